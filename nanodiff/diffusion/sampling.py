"""Losses and samples of a model: validation loss, bits/dim, images, a grid. The caller enters autocast."""

from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F

from nanodiff.common import (
    Progress,
    StackedGenerator,
    gather_objects,
    get_dist,
    heed_signals,
    make_generator,
    sum_over_ranks,
)
from nanodiff.diffusion.guidance import make_denoiser
from nanodiff.diffusion.timesteps import make_timesteps
from nanodiff.png import make_grid


@dataclass(frozen=True)
class SampleSettings:
    """How samples are drawn; make_denoiser explains guidance."""

    steps: int | str = 25  # or a respacing, see gaussian.space_timesteps
    sampler: str = "heun"
    cfg_scale: float = 1.0
    cfg_interval: tuple[float, float] = (0.0, 1.0)
    eta: float = 0.0  # ddim's
    weak_model: torch.nn.Module | None = None
    cfg_channels: int | None = None


def device_of(model) -> torch.device:
    return next(model.parameters()).device


def conditioning(model_config, x0, labels) -> dict[str, torch.Tensor]:
    """The model's inputs besides x_t and t: labels (N,) and, for super-resolution, x0 (N, C, H, W) made smaller."""
    cond = {"y": labels} if model_config.num_classes else {}
    if model_config.low_res:
        cond["low_res"] = F.interpolate(x0, size=model_config.low_res, mode="area")
    return cond


def quartile_sums(t, values, weight, process) -> torch.Tensor:
    """(2, 4) fp32: the sums of weight * values (N,) and of weight (N,) in each quarter of the range of t (N,)."""
    quarter = (t * 4 / (process.num_timesteps or 1)).long().clamp(max=3)
    is_in = quarter[:, None] == torch.arange(4, device=t.device)  # (N, 4)
    weighted = torch.stack([weight * values.detach().float(), weight.float()])  # (2, N)
    return (weighted[:, :, None] * is_in).sum(1)


def stored_images(dataset, ids, codec, device, randn_like=None):
    """x0 (N, C, H, W) and labels (N,); latents are samples if `randn_like` is given, else means."""
    stored = torch.from_numpy(dataset.images(ids)).to(device)
    return codec.to_x0(stored, None, randn_like), torch.from_numpy(dataset.labels(ids)).to(device)


def in_batches(ids: np.ndarray, batch_size: int) -> list[np.ndarray]:
    return np.split(ids, range(batch_size, len(ids), batch_size))


def rank_batches(batches: list[np.ndarray]):
    """This rank's batches, dealt out in turn."""
    rank, _, world = get_dist()
    for first in range(0, len(batches), world):
        heed_signals()  # sent to any rank; called equally often on every rank, even without a batch
        if first + rank < len(batches):
            yield batches[first + rank]


def gather_batches(compute, batches: list[np.ndarray], label: str = "") -> list:
    """[compute(ids) for each batch], split over ranks: the first rank gets all, the others their own."""
    done = {}  # first image of a batch -> its result
    with Progress(-(-sum(map(len, batches)) // get_dist()[2]), "images", label) as bar:
        for ids in rank_batches(batches):
            done[int(ids[0])] = compute(ids)
            bar.update(len(ids))
    for others in gather_objects(done):
        done |= others
    return [done[int(ids[0])] for ids in batches if int(ids[0]) in done]


@torch.no_grad()
def validation_loss(model, process, val_set, codec, num_images: int, batch_size: int, seed: int, timesteps: str):
    """(mean loss, [mean in each quarter of t, NaN if empty]) on the first `num_images` of `val_set`, over all ranks.

    t is distributed as in training, so that losses are comparable; uniformly for loss-second-moment, whose weights make
    the training loss a mean over uniform t. An image's noise depends on its index, its t on (seed, index), evenly
    spread: the same for any model, ranks and batch.
    """
    device = device_of(model)
    n = min(num_images, len(val_set))
    distribution = make_timesteps("uniform" if timesteps == "loss-second-moment" else timesteps, process)
    u = (torch.randperm(n, generator=make_generator(seed, 1)) + 0.5) / n
    sums = torch.zeros(2, 4, dtype=torch.float64)
    chosen = val_set.first(n)
    for ids in rank_batches(val_set.batches(chosen, batch_size)):
        count = len(ids)
        ids = np.pad(ids, (0, batch_size - count), mode="edge")  # a compiled model has one batch size
        generator = StackedGenerator(ids)
        x0, labels = stored_images(val_set, ids, codec, device, generator.randn_like)
        noise = generator.randn(x0.shape, device)
        t, weight = distribution.sample(u[np.searchsorted(chosen, ids)].to(device))
        loss = process.losses(model, x0, t, noise, **conditioning(model.config, x0, labels))["loss"]
        sums += quartile_sums(t[:count], loss[:count], weight[:count], process).cpu()
    total, weights = sum_over_ranks(sums, device)
    return float(total.sum() / n), (total / weights).tolist()


@torch.no_grad()
def bits_per_dim(model, process, val_set, codec, num_images: int, batch_size: int, progress=None) -> dict:
    """Means of process.bits_per_dim over the first `num_images` of `val_set`, over all ranks; floats or (T,) arrays.
    An image's noise depends on its index alone. Each batch of n calls progress(n)."""
    device = device_of(model)
    n = min(num_images, len(val_set))
    sums = {}
    for ids in rank_batches(val_set.batches(val_set.first(n), batch_size)):
        x0, labels = stored_images(val_set, ids, codec, device)
        terms = process.bits_per_dim(model, x0, StackedGenerator(ids), **conditioning(model.config, x0, labels))
        for name, value in terms.items():
            sums[name] = sums.get(name, 0) + value.cpu().double().sum(0)
        if progress:
            progress(len(ids))
    means = {name: sum_over_ranks(value, device) / n for name, value in sums.items()}
    return {name: value.numpy() if value.ndim else float(value) for name, value in means.items()}


@torch.no_grad()
def sample_images(model, process, seeds, cond, shape, settings, batch_size, on_step=None):
    """Samples (N, C, H, W) in [-1, 1], or latents; image i depends on seeds[i] and cond[...][i] alone.

    `shape` is (C, H, W). Step i of each batch calls on_step(i, steps, prediction of x0).
    """
    device = device_of(model)
    images = []
    for part in torch.arange(len(seeds)).split(batch_size):
        generator = StackedGenerator([seeds[i] for i in part])
        noise = generator.randn((len(part), *shape), device)
        inputs = {name: value[part].to(device) for name, value in cond.items()}
        denoiser = make_denoiser(model, inputs, settings, process.t_end)
        images.append(
            process.sample(denoiser, noise, settings.steps, settings.sampler, generator, on_step, settings.eta)
        )
    return torch.cat(images)


def network_evaluations(model, process, settings: SampleSettings) -> int:
    """Forward passes per image in sample_images, including the guide's; counted on a dummy model."""
    num_images = []

    def stand_in(x_t, t, **cond):
        num_images.append(len(x_t))
        return x_t.new_zeros(len(x_t), model.config.out_channels, 1, 1)

    stand_in.config = model.config
    cond = {"y": torch.zeros(1, dtype=torch.int64)} if model.config.num_classes else {}
    settings = replace(settings, weak_model=settings.weak_model and stand_in)
    denoiser = make_denoiser(stand_in, cond, settings, process.t_end)
    noise = torch.zeros(1, model.config.in_channels, 1, 1)
    process.sample(denoiser, noise, settings.steps, settings.sampler, eta=settings.eta)
    return sum(num_images)


def sample_grid(model, process, val_set, codec, settings: SampleSettings, batch_size: int) -> np.ndarray | None:
    """A grid (H, W, C) uint8 of fixed noise and classes, one class per row if there are at most ten.

    Super-resolution shows triplets of `val_set`: low resolution, sample, truth. With bucketed data each row has one
    shape. All ranks draw; None except on the first.
    """
    num_classes, low_res = model.config.num_classes, model.config.low_res
    columns = 8 if codec.image_size <= 128 else 4
    if low_res:
        n = 24
        truth, labels = stored_images(val_set, np.arange(n) % len(val_set), codec, device_of(model))
        cond = conditioning(model.config, truth, labels)
    else:
        n = columns * (num_classes if 0 < num_classes <= 10 else columns)
        cond = {"y": torch.arange(n) * num_classes // n} if num_classes else {}
    per_batch = min(batch_size, -(-n // get_dist()[2]))  # every rank draws something
    batches = in_batches(np.arange(n), per_batch if len(codec.shapes) == 1 else columns)

    def draw(ids):  # (k,) -> pictures (k or 3k, C, H, W) uint8
        inputs = {name: value[ids] for name, value in cond.items()}
        shape = codec.sample_shape(ids[0])
        images = sample_images(model, process, ids.tolist(), inputs, shape, settings, per_batch)
        if low_res:
            low = F.interpolate(inputs["low_res"], size=codec.shape[-1], mode="nearest")
            images = torch.stack([low, images, truth[ids]], dim=1).flatten(0, 1)
        return codec.to_pixels(images).numpy()

    pictures = [picture for batch in gather_batches(draw, batches, "grid") for picture in batch]
    return None if get_dist()[0] > 0 else make_grid(pictures, 9 if low_res else columns)
