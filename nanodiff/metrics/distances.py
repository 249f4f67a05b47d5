"""Distances between two sets of features, on the CPU and mostly in float64, so that machines agree."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from nanodiff.common import make_generator


def outer_sums(features: Tensor) -> Tensor:
    """Sum of x x^T over vectors (N, F), each with a 1 appended: (F + 1, F + 1) float64. Batches add up."""
    x = F.pad(features.double(), (0, 1), value=1.0)
    return x.T @ x


def mean_and_covariance(sums: Tensor) -> tuple[Tensor, Tensor]:
    """Mean (F,) and unbiased covariance (F, F) of the vectors in outer_sums."""
    count = sums[-1, -1]
    mu = sums[-1, :-1] / count
    scatter = sums[:-1, :-1] - count * mu.outer(mu)
    return mu, scatter / (count - 1)


def frechet_distance(mu1, sigma1, mu2, sigma2) -> float:
    """FID (Heusel et al. 2017, eq. 6) of means (F,) and covariances (F, F) in float64:

        |mu1 - mu2|^2 + tr(S1 + S2 - 2 (S1^1/2 S2 S1^1/2)^1/2)

    The last trace is the sum of the singular values of A1^T A2, where Ai Ai^T = Si. This takes no root of rounding
    noise, so S1 and S2 may be singular: fewer images than features are enough.
    """

    def factor(sigma):  # (F, rank): A with A A^T = sigma
        values, vectors = torch.linalg.eigh(sigma)
        eps = torch.finfo(values.dtype).eps
        noise = len(values) * eps * values[-1].clamp(min=0)
        rank = values > noise  # smaller eigenvalues are rounding errors of 0
        return vectors[:, rank] * values[rank].sqrt()

    overlap = torch.linalg.svdvals(factor(sigma1).T @ factor(sigma2)).sum()
    between_means = (mu1 - mu2).square().sum()
    total = between_means + sigma1.trace() + sigma2.trace() - 2 * overlap
    return max(float(total), 0.0)


def inception_score(logits: Tensor, splits: int = 10) -> float:
    """exp(mean KL(p(y|x) || p(y))) of logits (N, K) (Salimans et al. 2016): mean over `splits` parts.

    Logits are shuffled first, since samples often come sorted by class.
    """
    order = torch.randperm(len(logits), generator=make_generator(0))
    log_p = logits.double()[order].log_softmax(1)
    scores = []
    for part in log_p.tensor_split(splits):
        log_marginal = part.logsumexp(0) - math.log(len(part))  # (K,)
        scores.append((part.exp() * (part - log_marginal)).sum(1).mean().exp())
    return float(sum(scores)) / splits


def precision_recall(real: Tensor, fake: Tensor, k: int = 3) -> tuple[float, float]:
    """Precision and recall of fake features (M, F) against real ones (N, F) (Kynkaanniemi et al. 2019, eq. 2 and 3).

    Precision is the fraction of fake points within the real manifold, recall the reverse. A manifold is the union of
    balls around its points; the radius is the distance to the k-th neighbour.
    """
    # cdist computes x^2 + y^2 - 2xy: in float32 that is precise only for points near 0, so they are centred
    centre = real.double().mean(0)
    real = (real - centre).float()
    fake = (fake - centre).float()

    def radii(points):
        # k + 1, as the nearest is the point itself. In parts, as all distances would take gigabytes
        nearest = [torch.cdist(part, points).kthvalue(k + 1).values for part in points.split(1000)]
        return torch.cat(nearest)

    def fraction_within(points, centres, radius):
        is_within = [(torch.cdist(part, centres) <= radius).any(1) for part in points.split(1000)]
        return float(torch.cat(is_within).double().mean())

    return fraction_within(fake, real, radii(real)), fraction_within(real, fake, radii(fake))


def copies(real: Tensor, fake: Tensor) -> float:
    """Fraction of fake images (M, C, H, W) that are less than a third as far from the nearest real image (N, C, H, W)
    as from the second nearest (Yoon et al. 2023; Gu et al. 2023, arXiv:2310.02664). Mirrored copies count as well.
    """
    both = torch.stack([real, real.flip(3)]).flatten(2).float()  # (2, N, D)
    nearest = torch.cdist(fake.flatten(1).float(), both).amin(0)  # (M, N)
    first, second = nearest.topk(2, largest=False).values.T
    return float((first < second / 3).double().mean())
