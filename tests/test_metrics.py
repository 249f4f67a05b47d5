"""Laws of the distances: closed forms of Gaussians, scipy's square root, unbiasedness, known manifolds, ranks."""

import numpy as np
import pytest
import torch
from conftest import refused
from numpy.testing import assert_allclose

from nanodiff.metrics import distances
from nanodiff.metrics.distances import frechet_distance, inception_score, precision_recall
from nanodiff.metrics.features import load_stats


def randn(*shape, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=g, dtype=torch.float64)


def stats_of(features):
    sums = sum(distances.outer_sums(part) for part in features.split(13))
    mu, sigma = distances.mean_and_covariance(sums)
    assert_allclose(mu, features.mean(0), rtol=1e-9, atol=1e-12)
    assert_allclose(sigma, np.cov(features.numpy(), rowvar=False), rtol=1e-9, atol=1e-12)
    return mu, sigma


def test_frechet_distance_agrees_with_scipy():
    linalg = pytest.importorskip("scipy.linalg")
    x = randn(300, 40) @ randn(40, 40, seed=1)
    y = randn(200, 40, seed=2) @ randn(40, 40, seed=3) + 0.5
    mu1, s1 = stats_of(x)
    mu2, s2 = stats_of(y)
    root = linalg.sqrtm((s1 @ s2).numpy()).real
    expected = float((mu1 - mu2).square().sum() + s1.trace() + s2.trace())
    expected -= 2 * np.trace(root)
    assert frechet_distance(mu1, s1, mu2, s2) == pytest.approx(expected, rel=1e-9)


def test_frechet_distance_of_singular_covariances():
    # Gaussians on two lines at an angle: the overlap is |cos| a b; on lines at a right angle there is none.
    zero = torch.zeros(50, dtype=torch.float64)
    a = 3.0
    b = 0.7
    u, v, *_ = torch.linalg.qr(randn(50, 50))[0]
    w = 0.6 * u + 0.8 * v
    along = lambda vector: vector.outer(vector)
    distance = lambda sigma1, sigma2: frechet_distance(zero, sigma1, zero, sigma2)
    at_angle = distance(a * a * along(u), b * b * along(w))
    assert at_angle == pytest.approx(a * a + b * b - 2 * 0.6 * a * b, rel=1e-9)
    assert distance(along(u), along(v)) == pytest.approx(2, rel=1e-9)
    assert distance(0 * along(u), along(v)) == pytest.approx(1, rel=1e-12)


def test_published_reference_statistics(tmp_path):
    mu, sigma = stats_of(randn(30, 5))
    file = tmp_path / "ref.npz"
    np.savez(
        file,
        mu=mu.numpy(),
        sigma=sigma.numpy().astype(">f4"),
        mu_s=mu,
        sigma_s=sigma,
    )  # as ADM's
    torch.testing.assert_close(load_stats(file, 5).sigma, sigma, rtol=1e-6, atol=1e-6)
    refused("expected 2 features", load_stats, file, 2)
    np.savez(file, mu=np.zeros(2))
    refused("damaged or truncated: KeyError", load_stats, file, 2)
    file.write_text("text")
    refused("damaged or truncated", load_stats, file, 2)


def test_inception_score_in_closed_form():
    score = inception_score(randn(1, 1008).expand(200, -1))
    assert score == pytest.approx(1, abs=1e-12)
    certain = 1e4 * torch.eye(10).repeat(20, 1)
    score = inception_score(certain, splits=1)
    assert score == pytest.approx(10, rel=1e-9)
    # Half of the images believe in p, half in the mirrored: the marginal is (1/2, 1/2), KL = log 2 - H(p).
    p = 0.9
    logits = torch.tensor([[p, 1 - p], [1 - p, p]]).log().repeat(50, 1)
    entropy = -(p * np.log(p) + (1 - p) * np.log(1 - p))
    score = inception_score(logits, splits=1)
    assert score == pytest.approx(np.exp(np.log(2) - entropy), rel=1e-6)


def test_precision_recall_of_points_in_sight():
    # Real: 0, 1, 2, 3, ... on a line, k=1: each ball reaches to the next point. Between them is inside, -1.5 is not.
    real = torch.arange(10.0)[:, None]
    fake = torch.tensor([[0.5], [4.5], [-0.9], [-1.5], [100.0]])
    precision, recall = precision_recall(real, fake, k=1)
    assert precision == 3 / 5
    # The fakes' balls, with their radii: 0.5 (1.4), 4.5 (4), -0.9 and -1.5 (0.6), 100 (95.5): all reals are inside.
    assert recall == 1
    assert precision_recall(fake, real, k=1) == (recall, precision)
    assert precision_recall(real, real) == (1, 1)
    assert precision_recall(real, real + 100) == (0, 0)


def test_copies_are_much_nearer_to_one_image_than_to_the_next():
    """A mirrored or slightly noisy image is a copy; a new image of the distribution is none, nor a copied twin."""
    real, new = torch.randint(256, (2, 300, 3, 8, 8), generator=torch.Generator().manual_seed(0)).byte()
    real[1] = real[0]
    noisy = (real[2:30].float() + 4 * randn(28, 3, 8, 8)).clamp(0, 255).byte()
    fake = torch.cat([noisy, noisy.flip(3), real[:1], new[:43]])
    assert distances.copies(real, fake) == 0.56


def test_precision_recall_does_not_depend_on_the_origin():
    x = randn(1050, 12)  # more than a part
    y = 0.8 * randn(1030, 12, seed=1) + 0.3
    reference = precision_recall(x, y)
    assert min(reference) > 0
    assert max(reference) < 1
    assert precision_recall(x + 1000, y + 1000) == reference
