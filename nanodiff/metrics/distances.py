"""How good are samples? Distances between sets of features (of the Inception network or a judge), and class accuracy.

Everything is computed on the CPU, the statistics in float64: that is fast enough, and the same on every machine.
"""

import io
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from nanodiff.common import UserError, collective, make_generator
from nanodiff.files import write_atomic


def class_accuracy(predicted: torch.Tensor, labels: torch.Tensor) -> float:
    """Share of samples that show the class which was asked for: predicted (N,) and labels (N,), int64 -> [0, 1]."""
    assert predicted.shape == labels.shape and len(labels), (predicted.shape, labels.shape)
    return float((predicted.cpu() == labels.cpu()).double().mean())


# ---------------------------------------------------------------------------------------------------------------------
# Frechet distance (FID, where the features are Inception's)


class FeatureStats:
    """Running count, mean and covariance of feature vectors in float64; the features themselves are not kept."""

    def __init__(self, num_features: int):
        self.count = 0
        self.sum = torch.zeros(num_features, dtype=torch.float64)
        self.outer = torch.zeros(num_features, num_features, dtype=torch.float64)  # sum of x x^T

    def update(self, features: torch.Tensor) -> None:
        """Add features (N, F) of any dtype and device."""
        x = features.detach().cpu().double()
        self.count += len(x)
        self.sum += x.sum(0)
        self.outer += x.T @ x

    def merge(self, other: "FeatureStats") -> None:
        """Add all that another has seen."""
        self.count, self.sum, self.outer = self.count + other.count, self.sum + other.sum, self.outer + other.outer

    @collective("the sum of feature statistics over ranks")
    def all_reduce(self) -> None:
        """Merge with all other ranks; a collective, to be called once, by every rank. Nothing to do on one."""
        if not dist.is_initialized():
            return
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        flat = torch.cat([torch.tensor([self.count], dtype=torch.float64), self.sum, self.outer.flatten()]).to(device)
        dist.all_reduce(flat)
        count, self.sum, outer = flat.cpu().split([1, self.sum.numel(), self.outer.numel()])
        self.count, self.outer = int(count), outer.view_as(self.outer)

    @property
    def mu(self) -> torch.Tensor:
        """(F,) mean."""
        return self.sum / self.count

    @property
    def sigma(self) -> torch.Tensor:
        """(F, F) unbiased covariance. Raises UserError for fewer than two images."""
        if self.count < 2:
            raise UserError(f"the covariance of features takes at least 2 images, given: {self.count}")
        return (self.outer - self.count * self.mu.outer(self.mu)) / (self.count - 1)


def frechet_distance(mu1, sigma1, mu2, sigma2) -> float:
    """Squared Frechet (2-Wasserstein) distance of two Gaussians given as mean (F,), covariance (F, F) in float64.

    |mu1 - mu2|^2 + tr(S1 + S2 - 2 (S1^1/2 S2 S1^1/2)^1/2)    (Heusel et al. 2017, eq. 6)
    The last trace is the sum of the singular values of A1^T A2, for any A1 A1^T = S1 and A2 A2^T = S2. No root of a
    product's rounding noise is taken, so covariances may be singular, as they are for fewer images than features.
    """

    def factor(sigma):  # A with A A^T = sigma
        values, vectors = torch.linalg.eigh(sigma)
        noise = len(values) * torch.finfo(values.dtype).eps * values[-1].clamp(min=0)  # below it an eigenvalue is 0
        rank = values > noise  # (F,): of few images there are few columns, and the singular values below are cheap
        return vectors[:, rank] * values[rank].sqrt()

    assert mu1.dtype == mu2.dtype == sigma1.dtype == sigma2.dtype == torch.float64
    overlap = torch.linalg.svdvals(factor(sigma1).T @ factor(sigma2)).sum()
    distance = (mu1 - mu2).square().sum() + sigma1.trace() + sigma2.trace() - 2 * overlap
    return max(float(distance), 0.0)


def save_stats(path: Path, mu: torch.Tensor, sigma: torch.Tensor) -> None:
    """Write reference statistics as ADM and EDM do: an npz file of `mu` (F,) and `sigma` (F, F)."""
    file = io.BytesIO()
    np.savez(file, mu=mu.numpy(), sigma=sigma.numpy())
    write_atomic(Path(path), file.getvalue())


def load_stats(path: Path, num_features: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Read reference statistics, ours, ADM's or EDM's -> mu (F,), sigma (F, F) in float64. Nothing is unpickled.

    Raises UserError for an unreadable file, absent or misshapen arrays, values that no mean and covariance can have.
    """

    def require(condition, what):
        if not condition:
            raise UserError(f"reference statistics {path}: {what}")

    try:
        file = np.load(path, allow_pickle=False)
        require(isinstance(file, np.lib.npyio.NpzFile), "not an npz file")
        with file:
            require({"mu", "sigma"} <= set(file.files), f"holds {', '.join(file.files)}; needed: mu, sigma")
            mu, sigma = file["mu"], file["sigma"]
    except UserError:
        raise
    except Exception as error:  # zipfile and numpy raise nearly anything for a damaged file
        raise UserError(f"reference statistics {path} cannot be read: {type(error).__name__}: {error}") from None
    shapes = (num_features,), (num_features, num_features)
    require((mu.shape, sigma.shape) == shapes, f"mu {mu.shape}, sigma {sigma.shape}; needed: {shapes[0]}, {shapes[1]}")
    require(mu.dtype.kind == sigma.dtype.kind == "f", f"mu {mu.dtype}, sigma {sigma.dtype}; needed: floating-point")
    require(np.isfinite(mu).all() and np.isfinite(sigma).all(), "values that are not finite")
    mu, sigma = mu.astype(np.float64), sigma.astype(np.float64)  # also brings them to this machine's byte order
    require(sigma.diagonal().min() >= 0, "sigma has negative variances")
    require(np.abs(sigma - sigma.T).max() <= 1e-5 * np.abs(sigma).max(), "sigma is not symmetric")
    return torch.from_numpy(mu), torch.from_numpy(sigma)


# ---------------------------------------------------------------------------------------------------------------------
# Kernel distance (KID), Inception score, precision and recall


def kernel_distance(
    x: torch.Tensor, y: torch.Tensor, num_subsets: int = 100, subset_size: int = 1000, seed: int = 0
) -> tuple[float, float]:
    """KID of features (N, F), (M, F): mean and standard deviation over random subsets of an unbiased squared MMD.

    Kernel (x . y / F + 1)^3 (Binkowski et al. 2018). Unbiased, so near 0, and as often below it, for sets of the same
    distribution, however small. Subsets are no larger than the sets. Raises UserError for fewer than two images.
    """
    m = min(subset_size, len(x), len(y))
    if m < 2:
        raise UserError(f"KID takes at least 2 images of each set, given: {len(x)} and {len(y)}")

    def kernel(a, b):
        return (a @ b.T / a.shape[1] + 1) ** 3

    def mean_of_pairs(k):  # without the diagonal: that is what makes the estimate unbiased
        return (k.sum() - k.trace()) / (m * (m - 1))

    x, y = x.detach().cpu().double(), y.detach().cpu().double()
    generator, values = make_generator(seed), torch.empty(num_subsets, dtype=torch.float64)
    for i in range(num_subsets):
        a, b = (v[torch.randperm(len(v), generator=generator)[:m]] for v in (x, y))
        values[i] = mean_of_pairs(kernel(a, a)) + mean_of_pairs(kernel(b, b)) - 2 * kernel(a, b).mean()
    return float(values.mean()), float(values.std(correction=0))


def inception_score(logits: torch.Tensor, splits: int = 10, seed: int = 0) -> tuple[float, float]:
    """exp of the mean KL(p(y|x) || p(y)) of logits (N, K) (Salimans et al. 2016): mean, deviation over `splits` parts.

    From 1 (all images alike to the classifier) to K. The order is drawn first: samples often come sorted by class.
    """
    if len(logits) < splits:
        raise UserError(f"the Inception score in {splits} parts takes as many images, given: {len(logits)}")
    order = torch.randperm(len(logits), generator=make_generator(seed))
    log_p = logits.detach().cpu().double()[order].log_softmax(1)
    scores = []
    for part in log_p.tensor_split(splits):
        log_marginal = part.logsumexp(0) - np.log(len(part))
        scores.append((part.exp() * (part - log_marginal)).sum(1).mean().exp())
    return float(torch.stack(scores).mean()), float(torch.stack(scores).std(correction=0))


def precision_recall(real: torch.Tensor, fake: torch.Tensor, k: int = 3, batch_size: int = 1000) -> tuple[float, float]:
    """Share of the fake features (M, F) within the manifold of the real ones (N, F), and the reverse (coverage).

    The manifold of a set is the union of balls about its points, each reaching to the k-th nearest other point
    (Kynkaanniemi et al. 2019, eq. 2 and 3). Raises UserError for sets of k images or fewer.
    """
    if min(len(real), len(fake)) <= k:
        raise UserError(f"precision and recall take more than k={k} images, given: {len(real)} and {len(fake)}")
    centre = real.detach().cpu().double().mean(0)
    # A squared distance is computed as x^2 + y^2 - 2xy: about their common centre, float32 is precise enough for it.
    real, fake = ((v.detach().cpu().double() - centre).float() for v in (real, fake))

    def radii(points):  # the nearest of all is the point itself
        return torch.cat([torch.cdist(b, points).kthvalue(k + 1, dim=1).values for b in points.split(batch_size)])

    def share_within(points, centres, radius):
        within = [(torch.cdist(b, centres) <= radius).any(1) for b in points.split(batch_size)]
        return float(torch.cat(within).double().mean())

    return share_within(fake, real, radii(real)), share_within(real, fake, radii(fake))
