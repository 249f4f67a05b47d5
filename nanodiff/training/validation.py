"""Losses on held-out images: the validation loss, bits/dim. The caller enters autocast."""

from collections import defaultdict

import numpy as np
import torch

from nanodiff.common import StackedGenerator, make_generator
from nanodiff.conditions import conditioning
from nanodiff.diffusion.flow import FlowMatching
from nanodiff.diffusion.timesteps import make_timesteps
from nanodiff.dist import from_first_rank, gather_batches, rank_batch
from nanodiff.training.log import quartile_sums


def held_out(model, val_set, codec, ids, seed=0):
    """x0 (n, C, H, W) of these images, the model's conditions, and a generator seeded by the images' indices."""
    generator = StackedGenerator(ids, seed)
    x0, cond = codec.read(val_set, ids, generator.randn_like)
    return x0, conditioning(model.config, cond, x0), generator


@torch.no_grad()
def validation_loss(model, process, val_set, codec, num_images: int, batch_size: int, seed: int, t_range=()):
    """Mean loss over `num_images` of `val_set`, and [mean loss in each quarter of t, NaN if empty].

    An image's noise depends on its index, its t on (seed, index, num_images): both are the same for any model, number
    of ranks and batch size. All t together are evenly spread quantiles of one distribution. So that runs compare, it is
    logit-normal for flow matching and uniform for Gaussian diffusion, whatever training uses; in a `t_range`, uniform.
    """
    n = min(num_images, len(val_set))
    val_ids = val_set.spread(n)
    u = (torch.randperm(n, generator=make_generator(seed, 1)) + 0.5) / n
    plain = process if process.is_gaussian else FlowMatching()
    t_values, _ = make_timesteps("uniform" if t_range else "auto", plain, *t_range).sample(u)  # (n,), as `val_ids`

    def sums_of(ids):
        x0, cond, generator = held_out(model, val_set, codec, ids)
        noise = generator.randn(x0.shape, x0.device)
        t = t_values[np.searchsorted(val_ids, ids)].to(x0.device)
        loss = process.losses(model, x0, t, noise, cond)["loss"]  # (n,)
        return quartile_sums(t, loss, torch.ones_like(loss), process).cpu().double()

    batches = val_set.batches(val_ids, rank_batch(batch_size, n))
    sums = gather_batches(sums_of, batches, "validation")
    total, counts = from_first_rank(sum(sums), "the validation loss")
    return float(total.sum() / n), (total / counts).tolist()


@torch.no_grad()
def bits_per_dim(model, process, val_set, codec, num_images: int, batch_size: int, seed: int) -> dict:
    """Means of process.bits_per_dim over `num_images` of `val_set`: numbers or, by timestep, lists of T, T-1 first."""

    def sums_of(ids):
        x0, cond, generator = held_out(model, val_set, codec, ids, seed)
        terms = process.bits_per_dim(model, x0, cond, generator)  # (n,) or (n, T) each
        return {name: value.cpu().double().sum(0) for name, value in terms.items()}

    means = defaultdict(float)
    batches = val_set.batches(val_set.spread(num_images), rank_batch(batch_size, num_images))
    for sums in gather_batches(sums_of, batches, "bits/dim"):
        for name, value in sums.items():
            means[name] += value / num_images
    return from_first_rank({name: mean.tolist() for name, mean in means.items()}, "bits/dim")
