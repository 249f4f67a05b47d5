"""Model -> images: how samples are drawn, their conditions, a batch, a grid. The caller enters autocast."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nanodiff.common import Batches, StackedGenerator, Tensors, UserError, in_batches, print0
from nanodiff.conditions import FILES, IMAGES, conditioning, row_shapes, some_conditions
from nanodiff.data.dataloader import shuffled
from nanodiff.data.dataset import open_dataset
from nanodiff.data.pixels import Shape, from_stored, to_uint8, visible
from nanodiff.diffusion.guidance import make_denoiser
from nanodiff.diffusion.process import parse_interval
from nanodiff.dist import gather_batches, over_ranks, rank_batch
from nanodiff.png import make_grid


@dataclass(frozen=True)
class SampleSettings:
    """How samples are drawn; guidance: see make_denoiser."""

    steps: int | str = 9  # or a respacing, see gaussian.space_timesteps
    sampler: str = "ralston"
    cfg_scale: float = 1.0
    cfg_interval: tuple[float, float] = (0.0, 1.0)
    eta: float = 0.0  # ddim's
    cfg_channels: int = 0  # 0 = x_t's

    @property
    def named(self) -> dict:
        """Settings by the names that scripts give them, for file names and protocols."""
        return {"sampler": self.sampler, "steps": self.steps} | self.guidance

    @property
    def guidance(self) -> dict:
        low, high = self.cfg_interval
        return {"cfg_scale": self.cfg_scale, "cfg_interval": f"{low:g},{high:g}"}


def choose_sampler(process, sampler: str, steps: int | str, eta: float = 0.0) -> str:
    """Resolve "auto", and refuse what process.sample would fail on. `steps`: a number, or a respacing."""
    if sampler == "auto":
        sampler = process.default_sampler
    if sampler not in process.samplers:
        raise UserError(
            f"sampler={sampler!r} is not a sampler of {process.kind}; accepted: auto, {', '.join(process.samplers)}"
        )
    if eta and sampler != "ddim":
        raise UserError(f"eta={eta} with sampler={sampler}; accepted: 0, as only ddim takes another eta")
    if process.is_gaussian:
        process.respaced(steps)
    elif isinstance(steps, str):
        raise UserError(f"respacing={steps!r} with {process.kind}, whose t is continuous; accepted: steps")
    return sampler


def choose_guidance(cfg_scale: float, cfg_interval: str, fault: str, overrides):
    """The scale of the guidance that samples get, and its interval of t.

    `fault`: why the model cannot be guided, or "". If it cannot, both settings are ignored; a line names those in
    `overrides`.
    """
    interval = parse_interval(cfg_interval)
    if cfg_scale != 1 and not fault:
        return cfg_scale, interval
    names = "cfg_scale cfg_interval cfg_channels".split()
    settings = [f"{name}={overrides[name]}" for name in names if overrides.get(name, 1) != 1]
    if settings:
        print0(f"samples are not guided and ignore {' and '.join(settings)}: {fault or 'cfg_scale=1'}")
    return 1.0, (0.0, 1.0)


@dataclass(frozen=True)
class StartImages:
    """The images that samples start from, and the part to keep. Sample i starts from image i, modulo their number.

    At `strength` s the sampler runs the last fraction s of its steps, from the noised image (SDEdit, Meng et al. 2021,
    arXiv:2108.01073): 1 is plain sampling, 0 the image itself. Where `mask` is 1, each step's result is replaced by
    the image at the same noise level (RePaint, Lugmayr et al. 2022, arXiv:2201.09865, without resampling); where it is
    m, after the first fraction m of the steps, which leaves (1 - m) of the strength (Levin & Fried 2023,
    arXiv:2306.00950).
    """

    x0: Tensor  # (N, C, H, W), one per sample; in ModelSamples all images, as a data set stores them
    strength: float
    mask: Tensor  # (1, 1, H, W) in [0, 1], of x0
    description: dict = field(default_factory=dict)  # for protocols

    def is_kept(self, step: int, steps: int) -> Tensor:
        """Which part to replace after step 1 ... steps: (1, 1, H, W) bool."""
        return (self.mask * steps).round() >= step


@dataclass
class Inputs:
    """Rows of one condition: sample i takes row i, modulo their number, and that row's label (int64), if any.

    `buckets`: (H, W) -> range of rows; samples take rows of the bucket nearest in shape.
    `read`: row numbers (n,), the samples' (C, H, W) -> (n, ...) as models take them. `description`: for protocols.
    """

    read: Callable
    buckets: dict[tuple[int, int], range]
    labels: np.ndarray | None
    description: str
    of_set: bool = False  # then rows come in a random order, as a set may be sorted by class

    def rows(self, ids, shape) -> np.ndarray:
        ratio = shape[1] / shape[2]
        nearest = min(self.buckets, key=lambda size: abs(size[0] / size[1] - ratio))
        bucket = self.buckets[nearest]
        rows = np.asarray(ids) % len(bucket)
        if self.of_set:
            rows = shuffled(rows, len(bucket), (0,))
        return bucket.start + rows

    def __call__(self, ids, shape) -> Tensor:
        return self.read(self.rows(ids, shape), shape)


def inputs_of(dataset, codec, config) -> dict[str, Inputs]:
    """Inputs of a model's conditions besides classes, from a set, with labels. Conditions in FILES need no images."""

    def read(name, rows, shape):
        if name in FILES:
            return from_stored(dataset.cond(rows), codec.data)[name]
        x0, conditions = codec.read(dataset, rows)
        return conditioning(config, conditions, x0)[name]

    labels = dataset.labels(slice(None))
    return {
        name: Inputs(functools.partial(read, name), dataset.buckets, labels, dataset.identity, True)
        for name in row_shapes(config)
        if name != "y"
    }


def in_words(protocol: dict) -> str:
    """Say in words how images were drawn, from a protocol of ModelSamples; missing facts are left out."""
    words = []
    if "sampler" in protocol:
        words.append("{sampler}, {steps} steps ({network_evaluations} evaluations in all)".format(**protocol))
    if "cfg_scale" in protocol:
        template = "guidance {cfg_scale:g} at t in [{cfg_interval}], which counts double"
        guidance = "no guidance" if protocol["cfg_scale"] == 1 else template.format(**protocol)
        words += [guidance, f"seed {protocol['seed']}"]
    return ", ".join(words)


@dataclass
class ModelSamples:
    """Samples of a model, drawn on demand. In every script, sample i depends only on (seed, i) and its conditions."""

    model: torch.nn.Module
    process: object
    codec: object
    settings: SampleSettings
    seed: int = 0
    classes: list[int] | None = None  # taken in turn; None = the labels of `inputs`, or all classes
    inputs: dict = field(default_factory=dict)  # {name: Inputs} of the conditions besides classes
    size: Shape | None = None  # (C, H, W) of x0; None = the data's
    start_images: StartImages | None = None  # images to start from
    not_finite: int = 0  # images drawn with NaN or infinity

    @property
    def num_classes(self) -> int:
        return self.model.config.num_classes

    @property
    def shape(self) -> Shape:
        """(C, H, W) of an image."""
        side = self.codec.image_size
        channels = 3 if self.codec.data.latents else self.codec.shape[0]
        return channels, side, side

    @property
    def is_mixed(self) -> bool:
        """True if samples have several shapes. Each run of 8 samples shares one."""
        return not self.size and len(self.codec.shapes) > 1

    @property
    def turns(self) -> Inputs:
        """Rows whose labels samples take: an input's, if it has labels and no classes are given; else `classes`."""
        if self.num_classes and not self.classes:
            for inputs in self.inputs.values():
                if inputs.labels is not None:
                    return inputs
        classes = np.array(self.classes or range(max(self.num_classes, 1)))
        return Inputs(None, {(1, 1): range(len(classes))}, classes, "")

    @property
    def columns(self) -> int:
        """Columns of a grid: one per class if samples take 4 to 10 classes in turn, else 8."""
        n = len(self.turns.labels)
        return n if 4 <= n <= 10 and not self.is_mixed else 8

    def network_evaluations(self) -> int:
        """Forward passes per image, counted on a dummy model."""
        num_images = []

        def stand_in(x_t, t, **cond):
            num_images.append(len(x_t))
            return x_t.new_zeros(len(x_t), config.out_channels, 1, 1)

        config = self.model.config
        stand_in.config = config
        noise = torch.zeros(1, config.in_channels, 1, 1)
        start = self.start_images and replace(self.start_images, x0=noise)
        replace(self, model=stand_in).sample(noise, some_conditions(config, 1), start_image=start)
        return sum(num_images)

    @property
    def protocol(self) -> dict:
        protocol = self.settings.named | {
            "network_evaluations": self.network_evaluations(),
            "classes": "in the set's proportions" if self.classes else "all, balanced",
            "seed": self.seed,
            "rounding": self.codec.rounding,
        }
        for name, inputs in self.inputs.items():
            protocol[name] = inputs.description
            if inputs is self.turns:
                protocol["classes"] = f"of the rows of {name}"
        return protocol

    def shape_of(self, i: int) -> Shape:
        """(C, H, W) of a sample's x0."""
        return self.size or self.codec.sample_shape(i)

    def labels(self, ids) -> np.ndarray:
        """Classes (n,) int64 of samples; zeros for an unconditional model."""
        turns = self.turns
        rows = [turns.rows([i], self.shape_of(i))[0] for i in ids]
        return turns.labels[rows]

    def in_proportion(self, name: str, split: str, n: int) -> None:
        """Give n samples the classes of the set `name`, in the set's proportions.

        Samples with `inputs` keep the classes of their rows. If the set is about balanced, samples take all classes in
        turn: the counts of uniformly drawn labels have a variance of about their mean.
        """
        num_classes = self.num_classes
        if self.inputs or not num_classes:
            return
        try:
            dataset = open_dataset(name, split, self.codec.data)
        except UserError:
            print0(f"samples take all classes in turn: there is no set {name!r} here to take proportions from")
            return
        labels = dataset.labels(slice(None))
        labels = labels[labels < num_classes]
        counts = np.bincount(labels, minlength=num_classes)
        if counts.var() > 4 * counts.mean():
            self.classes = labels[np.arange(n) * len(labels) // n].tolist()  # evenly, as they may be sorted

    def batches(self, ids: np.ndarray, batch_size: int) -> Batches:
        """Consecutive ids in batches of one shape."""
        if self.is_mixed:
            batch_size = math.gcd(8, batch_size, ids[0])
        return in_batches(ids, batch_size)

    def sample(self, noise, cond: Tensors, **more) -> Tensor:
        """x0 (N, C, H, W) from noise; `more`: generator, on_step and start_image for process.sample."""
        settings = self.settings
        denoiser = make_denoiser(self.model, cond, settings)
        return self.process.sample(denoiser, noise, settings.steps, settings.sampler, eta=settings.eta, **more)

    def draw(self, ids, on_step=None) -> Tensor:
        """x0 (n, C, H, W) of samples `ids` of one shape, in [-1, 1], or latents.

        Step i calls on_step(i, steps, prediction of x0).
        """
        device = self.codec.device
        shape = self.shape_of(ids[0])
        cond = {}
        if self.num_classes:
            cond["y"] = torch.from_numpy(self.labels(ids)).to(device)
        for name, inputs in self.inputs.items():
            cond[name] = inputs(ids, shape).to(device)
        start = self.start_images
        if start:
            x0 = self.codec.to_x0(start.x0[ids % len(start.x0)].to(device))
            start = replace(start, x0=x0, mask=start.mask.to(device))
        generator = StackedGenerator(ids, self.seed)
        noise = generator.randn((len(ids), *shape), device)
        x0 = self.sample(noise, cond, generator=generator, on_step=on_step, start_image=start)
        self.not_finite += int((~x0.isfinite().flatten(1).all(1)).sum())
        return x0

    def check_finite(self, n: int) -> None:
        """A collective: FloatingPointError if some of n drawn images are not finite."""
        if bad := int(over_ranks(self.not_finite)):
            raise FloatingPointError(f"{bad:,} of {n:,} samples are not finite (NaN)")

    def images(self, ids, on_step=None) -> Tensor:
        """(n,) ids of one shape -> (n, C, H, W) uint8 on the CPU."""
        return self.codec.to_pixels(self.draw(ids, on_step))

    def second_images(self, ids) -> list[Tensor]:
        """The second images of samples `ids`, or []: (C, H, W) uint8 on the CPU, enlarged to the samples' size.

        Of latents in super-resolution the first channels: no decoder knows such small ones.
        """
        pictures = []
        for name in self.inputs.keys() & IMAGES:
            for part in self.batches(np.asarray(ids), 8):  # of one shape
                shape = self.shape_of(part[0])
                sides = [side * self.codec.downsample for side in shape[1:]]
                image = F.interpolate(self.inputs[name](part, shape), sides)
                pictures += to_uint8(visible(image)).cpu()
        return pictures


def sample_grid(model, process, val_set, codec, settings: SampleSettings, batch_size: int) -> np.ndarray | None:
    """A grid (H, W, 3) uint8 from fixed noise and classes: one class per row if there are at most ten.

    Other conditions and their labels come from `val_set`. If one is an image, as in super-resolution, the grid shows
    triples: condition, sample, truth. With bucketed data a row has one shape, unless it holds triples. All ranks draw;
    returns None except on the first.
    """
    columns = 8 if codec.image_size <= 128 else 4
    inputs = inputs_of(val_set, codec, model.config)
    image = next((inputs[name] for name in inputs.keys() & IMAGES), None)
    n = columns * columns
    num_classes = model.config.num_classes
    classes = None
    if image:
        n = 24
        columns = 9  # three triples
    elif num_classes and not inputs:
        if num_classes <= 10:
            n = columns * num_classes
        classes = (np.arange(n) * num_classes // n).tolist()
    samples = ModelSamples(model, process, codec, settings, classes=classes, inputs=inputs)
    batches = samples.batches(np.arange(n), rank_batch(batch_size, n))

    def draw(ids):  # (k,) -> k pictures or, with images, 3 k: (C, H, W) uint8 each
        images = samples.images(ids)
        if not image:
            return images
        truth, _ = codec.read(val_set, image.rows(ids, samples.shape_of(ids[0])))
        triples = zip(samples.second_images(ids), images, codec.to_pixels(truth))
        return [picture for triple in triples for picture in triple]

    pictures = [picture for part in gather_batches(draw, batches, "grid") for picture in part]
    samples.check_finite(n)
    return make_grid(pictures, columns) if pictures else None
