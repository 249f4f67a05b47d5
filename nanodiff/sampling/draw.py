"""Model -> images: settings of the samples, a batch of them, a grid. The caller enters autocast."""

import math
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.nn.functional as F

from nanodiff.common import StackedGenerator, UserError, get_dist, in_batches
from nanodiff.conditions import IMAGES, row_shapes, some_conditions
from nanodiff.data.codec import stored_images
from nanodiff.data.pixels import to_uint8, visible
from nanodiff.diffusion.guidance import make_denoiser
from nanodiff.dist import gather_batches
from nanodiff.png import make_grid
from nanodiff.sampling.given import Known
from nanodiff.sampling.inputs import rows_of


@dataclass(frozen=True)
class SampleSettings:
    """How samples are drawn; make_denoiser explains guidance."""

    steps: int | str = 25  # or a respacing, see gaussian.space_timesteps
    sampler: str = "heun"
    cfg_scale: float = 1.0
    cfg_interval: tuple[float, float] = (0.0, 1.0)
    eta: float = 0.0  # ddim's
    weak_model: torch.nn.Module | None = None
    cfg_channels: int = 0  # 0 = x_t's

    @property
    def named(self) -> dict:
        """By the names of the scripts' settings, for file names and protocols."""
        return {"sampler": self.sampler, "steps": self.steps} | self.guidance

    @property
    def guidance(self) -> dict:
        low, high = self.cfg_interval
        return {"cfg_scale": self.cfg_scale, "cfg_interval": f"{low:g},{high:g}"}


def in_words(protocol: dict) -> str:
    """Say in words how images were drawn, from the protocol of ModelSamples. Facts that it lacks are left out."""
    words = []
    if "sampler" in protocol:
        words.append("{sampler}, {steps} steps ({network_evaluations} evaluations)".format(**protocol))
    if "cfg_scale" in protocol:
        scale, interval = protocol["cfg_scale"], protocol["cfg_interval"].replace(",", "..")
        guidance = f"guidance {scale:g}" + (f" in {interval}" if interval != "0..1" else "")
        words += [guidance if scale != 1 else "no guidance", f"seed {protocol['seed']}"]
    return ", ".join(words)


def parse_classes(classes, class_names: list[str]) -> list[int] | None:
    """Class numbers from numbers and names, "ring,3", ["ring", 3] or 3; None for none given."""
    if not np.ndim(classes):
        classes = str(classes).split(",") if classes != "" else []
    numbers = {*map(str, range(len(class_names)))}
    chosen = []
    for given in classes:
        number = str(given)
        if number in class_names and not number.isdecimal():
            number = class_names.index(number)
        if str(number) not in numbers:
            known = "this model has no classes"
            if class_names:
                known = f"this model has {len(class_names)} classes; accepted: {', '.join(class_names)[:200]}"
            raise UserError(f"classes: {given!r} is unknown; {known}")
        chosen.append(int(number))
    return chosen or None


def parse_size(size: str, model_config, codec) -> tuple[int, int, int] | None:
    """(C, H, W) of x0 for images of "HEIGHTxWIDTH", "HEIGHT,WIDTH" or "SIDE" pixels; None for ""."""
    if not size:
        return None
    pixels = codec.image_size // codec.shape[1]  # per latent
    unit, largest = model_config.side_unit * pixels, 4 * codec.image_size
    sides = [int(side) if side.isdecimal() else 0 for side in size.replace(",", "x").split("x")]
    if len(sides) > 2 or any(side % unit or not 0 < side <= largest for side in sides):
        accepted = f"HEIGHTxWIDTH or SIDE in pixels, multiples of {unit} up to {largest:,}"
        raise UserError(f"size={size!r}; accepted: {accepted}")
    shape = (codec.shape[0], sides[0] // pixels, sides[-1] // pixels)
    if shape not in codec.shapes and row_shapes(model_config).keys() & IMAGES:
        accepted = ", ".join(f"{height * pixels}x{width * pixels}" for _, height, width in codec.shapes)
        raise UserError(f"size={size!r}; accepted with a second image: {accepted}, as the data's")
    return shape


@torch.no_grad()
def sample_images(model, process, seeds, cond, shape, settings, on_step=None, known=None):
    """A batch of samples (N, *shape) in [-1, 1], or latents; image i depends on seeds[i] and cond[...][i] alone.

    Step i calls on_step(i, steps, prediction of x0). `known`: the Known that they start from.
    """
    device = next(model.parameters()).device
    generator = StackedGenerator(seeds)
    noise = generator.randn((len(seeds), *shape), device)
    denoiser = make_denoiser(model, {name: x.to(device) for name, x in cond.items()}, settings)
    return process.sample(denoiser, noise, settings.steps, settings.sampler, generator, on_step, settings.eta, known)


def network_evaluations(model, process, settings: SampleSettings, strength: float = 1.0) -> int:
    """Forward passes per image in sample_images, including the guide's; counted on a dummy model."""
    num_images = []

    def stand_in(x_t, t, **cond):
        num_images.append(len(x_t))
        return x_t.new_zeros(len(x_t), model.config.out_channels, 1, 1)

    stand_in.config = model.config
    noise = torch.zeros(1, model.config.in_channels, 1, 1)
    cond = some_conditions(model.config, 1)
    settings = replace(settings, weak_model=settings.weak_model and stand_in)
    denoiser = make_denoiser(stand_in, cond, settings)
    known = Known(noise, strength, torch.zeros(1, dtype=torch.bool))
    process.sample(denoiser, noise, settings.steps, settings.sampler, eta=settings.eta, known=known)
    return sum(num_images)


@dataclass
class ModelSamples:
    """Samples of a model, drawn on demand. Sample i depends only on (seed, i) and its conditions, in every script. The
    caller enters autocast."""

    model: torch.nn.Module
    process: object
    codec: object
    settings: SampleSettings
    seed: int = 0
    classes: list[int] | None = None  # taken in turn; None = those of the inputs below, or all
    inputs: dict = field(default_factory=dict)  # {name: Inputs} of the conditions besides classes
    given: object = None  # GivenImages to start from
    not_finite: int = 0  # images drawn with NaN or infinity

    @property
    def num_classes(self) -> int:
        return self.model.config.num_classes

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, H, W) of an image."""
        side = self.codec.image_size
        return (3 if "latents" in self.codec.description else self.codec.shape[0], side, side)

    @property
    def labelled(self):
        """The Inputs whose labels samples take, if any."""
        if self.num_classes and not self.classes:
            return next((inputs for inputs in self.inputs.values() if inputs.labels is not None), None)

    @property
    def turns(self) -> torch.Tensor:
        """The classes that samples take in turn: int64."""
        if self.labelled:
            return torch.from_numpy(self.labelled.labels)
        return torch.tensor(self.classes or range(max(self.num_classes, 1)))

    @property
    def protocol(self) -> dict:
        strength = self.given.strength if self.given else 1.0
        protocol = self.settings.named | {
            "network_evaluations": network_evaluations(self.model, self.process, self.settings, strength),
            "classes": "all, balanced",
            "seed": self.seed,
            "rounding": "round(127.5 (x + 1)), clamped to 0..255",
        }
        for name, inputs in self.inputs.items():
            protocol[name] = inputs.described
            if inputs.labels is not None:
                protocol["classes"] = f"of the rows of {name}"
        return protocol

    def labels(self, ids, shape=None) -> torch.Tensor:
        """Classes (n,) int64 of samples of this shape, by default their own; zeros for an unconditional model."""
        rows = torch.as_tensor(ids) % len(self.turns)
        if self.labelled:
            rows = [int(self.labelled.rows(i, shape or self.codec.sample_shape(i))) for i in ids]
        return self.turns[rows]

    def batches(self, ids, batch_size: int) -> list[np.ndarray]:
        """Split ids into batches in which all samples have one shape."""
        by_shape = {}
        for i in ids:
            by_shape.setdefault(self.codec.sample_shape(i), []).append(i)
        batches = []
        for alike in by_shape.values():
            batches += in_batches(np.array(alike), batch_size)
        return batches

    def draw(self, ids, shape=None, on_step=None) -> torch.Tensor:
        """x0 of a batch of samples `ids` (n,) of one `shape` (C, H, W), by default the first's; see sample_images."""
        shape = shape or self.codec.sample_shape(ids[0])
        cond = {"y": self.labels(ids, shape)} if self.num_classes else {}
        cond |= {name: inputs(ids, shape) for name, inputs in self.inputs.items()}
        seeds = [(self.seed << 32) + int(i) for i in ids]
        known = self.given.known(ids) if self.given else None
        x0 = sample_images(self.model, self.process, seeds, cond, shape, self.settings, on_step, known)
        is_finite = x0.isfinite().flatten(1).all(1)  # (n,)
        self.not_finite += int((~is_finite).sum())
        return x0

    def images(self, ids) -> torch.Tensor:
        """(n,) ids of one shape -> (n, C, H, W) uint8 on the CPU."""
        return self.codec.to_pixels(self.draw(ids))

    def shown(self, ids, shape=None) -> list[torch.Tensor]:
        """The second images of samples `ids`, enlarged to theirs: (C, H, W) uint8 on the CPU each; [] without."""
        pictures = []
        for name in self.inputs.keys() & IMAGES:
            for part in in_batches(np.asarray(ids), 8):  # of one shape
                size = shape or self.codec.sample_shape(part[0])
                image = self.inputs[name](part, size)
                if name == "low_res":  # of x0
                    pictures += self.codec.to_pixels(F.interpolate(image, size[1:], mode="nearest"))
                else:
                    sides = [side * self.codec.image_size // self.codec.shape[1] for side in size[1:]]
                    pictures += to_uint8(visible(F.interpolate(image, sides, mode="nearest"))).cpu()
        return pictures


def sample_grid(model, process, val_set, codec, settings: SampleSettings, batch_size: int) -> np.ndarray | None:
    """A grid (H, W, C) uint8 from fixed noise and classes: one class per row if there are at most ten.

    Other conditions, and the labels beside them, come from `val_set`. If one is an image, as in super-resolution, the
    grid shows triples: condition, sample, truth. With bucketed data each row has one shape. All ranks draw; returns
    None except on the first.
    """
    config = model.config
    device = next(model.parameters()).device
    rank, _, world = get_dist()
    columns = 8 if codec.image_size <= 128 else 4
    taken = [name for name in row_shapes(config) if name != "y"]
    inputs = {name: rows_of(val_set, name, codec, config, device) for name in taken}
    image = next((inputs[name] for name in taken if name in IMAGES), None)
    n, num_classes, classes = columns * columns, config.num_classes, None
    if image:
        n = 24
    elif num_classes and not inputs:
        if num_classes <= 10:
            n = columns * num_classes
        classes = (np.arange(n) * num_classes // n).tolist()
    samples = ModelSamples(model, process, codec, settings, classes=classes, inputs=inputs)
    per_batch = min(batch_size, -(-n // world))  # every rank draws something
    batches = in_batches(np.arange(n), per_batch if len(codec.shapes) == 1 else math.gcd(columns, per_batch))

    def draw(ids):  # (k,) -> k pictures or, with images, 3 k: (C, H, W) uint8
        shape = codec.sample_shape(ids[0])
        pictures = [samples.images(ids)]
        if image:
            truth, _ = stored_images(val_set, image.rows(ids, shape), codec, device)
            pictures = [samples.shown(ids, shape), *pictures, codec.to_pixels(truth)]
        return [picture.numpy() for row in zip(*pictures) for picture in row]

    parts = gather_batches(draw, batches, "grid")
    if rank > 0:
        return None
    return make_grid([picture for part in parts for picture in part], 9 if image else columns)
