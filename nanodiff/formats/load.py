"""From a file to a model: build(*read(*find(name)), device) is load_run.

Our weight files describe themselves. A reader returns (meta, tensors). meta has step, ema, arch, config (the
settings), model_config, data (a DataInfo), process, path and source, and for adapters lora. tensors have our parameter
names.
"""

import dataclasses
import json
import os
import re
from pathlib import Path

import torch

from configurator import check, nearest, read_settings
from nanodiff.common import Settings, Tensors, UserError, base_dir, print0
from nanodiff.conditions import DataInfo, droppable
from nanodiff.diffusion.process import make_process, why_unguided
from nanodiff.files import reading, sha256_of, why_corrupt
from nanodiff.formats import options as defaults
from nanodiff.formats.adapters import PREFIX, merge
from nanodiff.formats.published import NO_MODEL, read_published
from nanodiff.models.build import empty_model, load_weights, stored_config
from nanodiff.safetensors import fingerprint, read_tensors
from nanodiff.training.checkpoint import find_weights

WEIGHTS = Path(__file__).parents[2] / "runs" / "weights"  # in a clone
# Files of weights in the folder of a diffusers model, beside a config.json; a later one is preferred
DIFFUSERS = """
    diffusion_pytorch_model.fp16.bin diffusion_pytorch_model.bin
    diffusion_pytorch_model.fp16.safetensors diffusion_pytorch_model.safetensors
    """.split()
OPTIONS = read_settings(vars(defaults))
OPTION = re.compile(f",({'|'.join(OPTIONS)})=([^,]*)$")


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A trained model and everything needed to sample from it or evaluate it."""

    model: torch.nn.Module
    process: object
    config: Settings
    data: DataInfo
    step: int
    source: str  # the file and its options
    weights: str  # a rate, "raw" or "as published"
    path: Path  # of the file

    @property
    def run_dir(self) -> Path | None:
        """The run's folder, if the file lies in one of its checkpoints."""
        folder = self.path.parent
        is_ours = folder.parent.name == "checkpoints" and (folder / "manifest.json").exists()
        return folder.parent.parent if is_ours else None

    def is_named_by(self, model: str) -> bool:
        """True if a script's `model` names the run alone: no file of it, no options."""
        return bool(self.run_dir) and Path(model).name in ("", self.run_dir.name)

    @property
    def num_classes(self) -> int:
        """0 if the model is unconditional."""
        return self.model.config.num_classes

    @property
    def class_names(self) -> list[str]:
        return self.data.class_names[: self.num_classes]

    @property
    def title(self) -> str:
        """Names the weights in a few words."""
        name = f"{self.run_dir.name}, step {self.step:,}" if self.run_dir else Path(self.source).name
        return f"{name}, weights {self.weights}"

    @property
    def why_unguided(self) -> str:
        """Why the model cannot be guided; "" if it can."""
        return why_unguided(self.config, droppable(self.model.config), self.step)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def described(self) -> dict:
        """Identifies the weights in a protocol."""
        return {
            "checkpoint": self.source,
            "step": self.step,
            "weights": self.weights,
            "sha256": sha256_of(self.path),
        }

    def sample(self, *args, **settings):
        """See sampling.loaded.sample."""
        from nanodiff.sampling.loaded import sample  # here, so that loading a model does not import sampling

        return sample(self, *args, **settings)


def shipped() -> dict[str, Path]:
    """{name: file} of the weights that come with the code."""
    return {path.stem: path for path in sorted(WEIGHTS.glob("*.safetensors"))}


def known_runs() -> list[Path]:
    """Folders of runs, the latest written first."""
    runs = {path.parent.parent for path in (base_dir() / "runs").glob("*/checkpoints/step_*")}
    return sorted(runs, key=os.path.getmtime, reverse=True)


def find_run(run: str) -> Path:
    """Find the folder of a run by tag or path, a file by path, or shipped weights by name or by their path in another
    clone, as adapters may record it. "" finds the run written to last, else the first of the shipped weights."""
    runs = known_runs()
    names = shipped() | {path.name: path for path in runs}
    weights = WEIGHTS / run.rpartition("runs/weights/")[2]
    # A tag comes before a folder here of its name, which may hold images
    places = [names.get(run, ""), os.path.expanduser(run), base_dir() / "runs" / run, weights]
    if not run:
        places = [*runs, *names.values()]
    for path in places:
        if os.path.exists(path):  # False, instead of an exception, for a name that is too long
            return Path(path)
    raise UserError(
        f"{run!r} is no folder, file or tag; nearest tags: {nearest(run, names)}; "
        f"shipped: {', '.join(shipped())}; base_train trains one; options behind a name: {', '.join(OPTIONS)}"
    )


def split_options(run: str):
    """("FILE", {"heads": 6}) from "FILE,heads=6"."""
    options = {}
    while match := OPTION.search(run):
        name, value = match.groups()
        try:
            options[name] = check(OPTIONS, name, value, f"{run!r}: ")
        except ValueError as error:
            raise UserError(str(error)) from None
        run = run[: match.start()]
    return run, options


def with_options(path: Path, options: Settings) -> str:
    """The inverse of split_options."""
    texts = [f"{name}={options[name]}" for name in sorted(options)]
    return ",".join([str(path), *texts])


def find(name, **run_options):
    """The file of weights that load_run's arguments name, and its options. `name`: str or Path;
    `run_options`: step, ema."""
    name, options = split_options(str(name))
    for key, value in run_options.items():
        if value != getattr(defaults, key) and options.setdefault(key, value) != value:
            raise UserError(f"{key} is given twice: {value}, and {options[key]} behind {name}")
    path = find_run(name)
    folder = path / "transformer" if (path / "transformer").is_dir() else path  # of a pipeline
    for name in DIFFUSERS:
        file = folder / name
        if file.is_file():
            path = file
    is_file = path.is_file()
    for key in options:
        if (key in ("step", "ema")) == is_file:
            raise UserError(
                f"{key}={options[key]} is no option of {path}, a "
                f"{'file' if is_file else 'run; name the file of weights, if it is none'}"
            )
    if is_file:
        # Of a checkpoint
        if path.with_name("manifest.json").is_file() and (fault := why_corrupt(path.parent, file=path.name)):
            raise UserError(f"{path} is corrupt: {fault}")
        return path, options
    return find_weights(path, **options), {}


def read_file(path: Path, options: Settings):
    """Read (meta, tensors in fp32) from a file of weights or adapters. `options`: what a published file lacks."""
    tensors, metadata = read_tensors(path)
    fault = "describes no model of this version" if "model_config" in metadata else NO_MODEL
    with reading(path, fault):
        if "model_config" not in metadata:
            meta, tensors = read_published(path, tensors, options)
        elif options:
            raise UserError(f"{path} describes itself; accepted: no {', '.join(options)}")
        else:
            meta = {key: json.loads(value) for key, value in metadata.items() if key != "format"}
            meta["data"] = DataInfo(**meta["data"])
            meta["model_config"] = stored_config(meta)
        meta["process"] = make_process(meta["config"], meta["data"])
        tensors = {name.removeprefix(PREFIX): x.float() for name, x in tensors.items()}
    if "sha256" in meta and meta["sha256"] != fingerprint(tensors):
        raise UserError(f"{path} is corrupt: its tensors do not match the SHA-256 in its metadata")
    return meta | {"path": path, "source": with_options(path, options)}, tensors


def read(
    path: Path,
    options: Settings,
    lora: str | Path = "",
    lora_scale: float = 1.0,
) -> tuple[dict, Tensors]:
    """Read (meta, tensors) of a whole model, and merge the adapters in the file `lora`. If `path` holds adapters, they
    are merged into their base."""
    meta, tensors = read_file(path, options)
    if note := meta.pop("note", ""):
        print0(note)
    if not lora and lora_scale != 1 and "lora" not in meta:
        raise UserError(f"lora_scale={lora_scale} would do nothing: {path} has no adapters")
    if "lora" in meta:
        scale = 1.0 if lora else lora_scale
        base = meta["lora"]["base"]
        try:
            source = find(base)
        except UserError:
            raise UserError(
                f"{path} adapts {base}, which is missing; if it moved: --model=BASE --lora={path}"
            ) from None
        base_meta, tensors = read(*source, path, scale)
        meta["model_config"] = base_meta["model_config"]  # a published UNet may lack the null class
    if lora:
        adapters, adapter_tensors = read_file(*find(lora))
        if "lora" not in adapters:
            raise UserError(f"{lora} holds no adapters of base_train")
        meta, tensors = merge(meta, tensors, adapters, adapter_tensors, lora_scale)
    return meta, tensors


def build(meta: dict, tensors: Tensors, device) -> Loaded:
    """The model that `meta` describes, with these tensors."""
    model = empty_model(meta["model_config"])
    load_weights(model, tensors, meta["source"], assign=True)
    model.to(device).eval()
    return Loaded(
        model=model,
        process=meta["process"],
        config=meta["config"],
        data=meta["data"],
        step=meta["step"],
        source=meta["source"],
        weights=meta["ema"],
        path=meta["path"],
    )


def load_run(
    run: str,
    device,
    step: int | str = "newest",
    ema: str = "",
    lora: str = "",
    lora_scale: float = 1.0,
) -> Loaded:
    """Load a model to sample from or to evaluate.

    `run`: a run's folder or tag, our .safetensors (an export, adapters), a published file, or the folder of a diffusers
    model or pipeline; options may follow it (options.py). For a run, `step` chooses the checkpoint, "newest" or a
    number, and `ema` the weights: a rate, "raw", or "" for the first rate. `lora`: see read.
    """
    path, options = find(run, step=step, ema=ema)
    meta, tensors = read(path, options, lora, lora_scale)
    return build(meta, tensors, device)
