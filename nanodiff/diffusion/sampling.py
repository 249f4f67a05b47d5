"""What base_train, lora_train, sample and base_eval ask of a model: its loss, its samples."""

import numpy as np
import torch
import torch.nn.functional as F

from nanodiff.common import StackedGenerator, get_dist, make_generator, sum_over_ranks
from nanodiff.diffusion.guidance import make_denoiser
from nanodiff.diffusion.timesteps import make_timesteps
from nanodiff.png import make_grid


def conditioning(x0, labels, num_classes: int, low_res_size: int) -> dict:
    """What a model is given besides x_t and t: labels (N,); for super-resolution x0 (N, C, H, W) shrunk by areas."""
    cond = {"y": labels} if num_classes else {}
    if low_res_size:
        cond["low_res"] = F.interpolate(x0, size=low_res_size, mode="area")
    return cond


def quartile_sums(t, values, process) -> torch.Tensor:
    """(2, 4): sums of `values` (N,) and their number, by quarter of the range of t (N,). On the CPU, in float64."""
    quarter = (t.cpu().double() * 4 / (process.num_timesteps or 1)).long().clamp(max=3)
    both = torch.stack([values.detach().cpu().double(), torch.ones(len(t), dtype=torch.float64)])
    return torch.zeros(2, 4, dtype=torch.float64).index_add_(1, quarter, both)


def stored_images(dataset, ids, codec, device, generator=None):
    """x0 (N, C, H, W) and labels (N,) of a data set's images; of latents a sample, by `generator`, or their mean."""
    stored = torch.from_numpy(dataset.images(ids)).to(device)
    eps = generator.randn((len(ids), *codec.shape), device) if generator and codec.stochastic else None
    return codec.to_x0(stored, eps=eps), torch.from_numpy(dataset.labels(ids)).to(device)


@torch.no_grad()
def validation_loss(model, process, val_set, num_images, seed, codec, batch_size, device, autocast, low_res_size=0):
    """(mean, [4 means by quarter of t]) of the loss on the first `num_images` validation images, over all ranks.

    The noise of an image is a function of its index, its t of (seed, index), the t spread evenly over their range: the
    same for any model, number of ranks and batch size. All batches are full: a compiled model has one shape to know.
    """
    rank, _, world = get_dist()
    n, sums = min(num_images, len(val_set)), torch.zeros(2, 4, dtype=torch.float64)
    timesteps = make_timesteps("uniform", process)
    u = (torch.randperm(n, generator=make_generator(seed, 1)) + 0.5) / n
    for start in range(rank * batch_size, n, world * batch_size):
        ids = np.arange(start, start + batch_size)
        real, ids = torch.from_numpy(ids < n), np.minimum(ids, n - 1)
        generator = StackedGenerator(ids)
        x0, labels = stored_images(val_set, ids, codec, device, generator)
        cond = conditioning(x0, labels, model.config.num_classes, low_res_size)
        noise = generator.randn(x0.shape, device)
        t, _ = timesteps.sample(u[ids].to(device))
        with autocast:
            loss = process.losses(model, x0, t, noise, **cond)["loss"]
        sums += quartile_sums(t.cpu()[real], loss.cpu()[real], process)
    total, count = sum_over_ranks(sums, device)
    return float(total.sum() / count.sum()), (total / count).tolist()


@torch.no_grad()
def bits_per_dim(
    model, process, val_set, num_images, codec, batch_size, device, autocast, low_res_size=0, progress=None
):
    """The variational bound on the first `num_images` validation images, over all ranks: a dict of means.

    total_bpd and prior_bpd, floats in bits per dimension; vb, xstart_mse and mse (T,), by timestep, first t = T-1.
    The noise of an image is a function of its index. T evaluations of the model per image (IDDPM, section 3).
    """
    rank, _, world = get_dist()
    n, sums = min(num_images, len(val_set)), {}
    for part in torch.arange(n).tensor_split(world)[rank].split(batch_size):
        ids = part.numpy()
        x0, labels = stored_images(val_set, ids, codec, device)
        cond = conditioning(x0, labels, model.config.num_classes, low_res_size)
        with autocast:
            terms = process.bits_per_dim(model, x0, StackedGenerator(ids), **cond)
        for name, value in terms.items():
            sums[name] = sums.get(name, 0) + value.cpu().double().sum(0)
        if progress:
            progress(len(ids))
    means = {name: sum_over_ranks(value, device) / n for name, value in sums.items()}
    return {name: value.numpy() if value.ndim else float(value) for name, value in means.items()}


@torch.no_grad()
def sample_images(
    model, process, seeds, cond, shape, steps, sampler, batch_size, device, autocast, progress=None, on_step=None,
    **guidance,
):  # fmt: skip
    """Samples (N, C, H, W) in [-1, 1]; image i is a function of seeds[i] and cond[...][i], not of the batch it is in.

    `shape` is (C, H, W); `guidance` goes to make_denoiser (cfg_scale, cfg_interval, ...); `progress(n)` per batch.
    `on_step(i, steps, x0)` follows each step of a batch with the present prediction of its images.
    """
    images = []
    for part in torch.arange(len(seeds)).split(batch_size):
        generator = StackedGenerator([seeds[i] for i in part])
        noise = generator.randn((len(part), *shape), device)
        denoiser = make_denoiser(model, **{k: v[part].to(device) for k, v in cond.items()}, **guidance)
        with autocast:
            images.append(process.sample(denoiser, noise, steps, sampler, generator, on_step))
        if progress:
            progress(len(part))
    return torch.cat(images)


def network_evaluations(model, process, steps, sampler, weak_model=None, **guidance) -> int:
    """Forward passes per image that sample_images makes, those of the guide included: counted on stand-ins."""
    num_images = []

    def stand_in(x_t, t, **cond):
        num_images.append(len(x_t))
        return x_t.new_zeros(len(x_t), model.config.out_channels, 1, 1)

    stand_in.config = model.config
    y = torch.zeros(1, dtype=torch.int64) if model.config.num_classes else None
    denoiser = make_denoiser(stand_in, y, weak_model=weak_model and stand_in, **guidance)
    process.sample(denoiser, torch.zeros(1, model.config.in_channels, 1, 1), steps, sampler)
    return sum(num_images)


def sample_grid(
    model, process, val_set, steps, sampler, cfg_scale, codec, batch_size, device, autocast, low_res_size=0
):
    """A grid (H, W, C) uint8 of fixed noise and classes, eight images to a row (four of more than 128 px), a row to a
    class where these are few.

    Super-resolution shows triplets from the validation set: low resolution, sample, truth.
    """
    num_classes = model.config.num_classes
    columns = 8 if codec.image_size <= 128 else 4
    n = 24 if low_res_size else columns * (num_classes if 0 < num_classes <= 10 else columns)
    y = torch.arange(n) // columns if num_classes <= 10 else torch.linspace(0, num_classes - 1, n).long()
    cond = {"y": y} if num_classes else {}
    if low_res_size:
        truth, labels = stored_images(val_set, np.arange(n) % len(val_set), codec, device)
        cond = conditioning(truth, labels, num_classes, low_res_size)
    images = sample_images(
        model, process, range(n), cond, codec.shape, steps, sampler, batch_size, device, autocast,
        cfg_scale=cfg_scale if num_classes else 1.0,
    )  # fmt: skip
    if low_res_size:
        low = F.interpolate(cond["low_res"], size=codec.shape[-1], mode="nearest")
        images = torch.stack([low, images, truth], 1).flatten(0, 1)
    pixels = codec.to_pixels(images).numpy()
    scale = max(1, 48 // pixels.shape[-1])  # so that small images can be seen
    return make_grid(pixels, columns=9 if low_res_size else columns, scale=scale)
