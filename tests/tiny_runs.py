"""A tiny data set, and runs of it with weights that depend on everything, for tests of what comes after training."""

import json
import runpy
import shutil
import struct
import sys
import zlib

import numpy as np
import pytest
import torch
from processes import run_process

from nanodiff.data.dataset import DatasetWriter
from nanodiff.data.shapes import CLASS_NAMES, draw_shapes
from nanodiff.files import load_tensors
from nanodiff.models.autoencoder import AutoencoderKL
from nanodiff.safetensors import load_safetensors, save_safetensors
from nanodiff.training.checkpoint import load_meta, save_checkpoint
from nanodiff.training.optim import AdamW, Muon, param_groups
from nanodiff.training.shard import Optimizer

TIMELESS = ("--dtype=float32", "--device_type=cpu")
PLAIN = ("--sample_every=-1", "--compile=False", *TIMELESS)
TINY = "--data=tiny --depth=1 --patch_size=4 --total_batch_size=8 --num_iterations=0 --eval_every=-1"
TINY = [*TINY.split(), *PLAIN]
GAUSSIAN = ("--objective=eps", "--num_timesteps=50")
RUNS = dict(
    eps=(*GAUSSIAN, "--variance=learned_range"),
    small=(*GAUSSIAN, "--variance=fixed_small"),
    plain=["--class_cond=False"],
    always=["--label_drop=0"],
    x0=["--objective=flow_x0"],
    large=["--data=large"],
    sr=["--low_res_size=8"],
    flow=[],
)


def make_data(name="tiny", resolution=16, class_names=CLASS_NAMES, overwrite=False, vectors_of=None, **sizes):
    """A data set of shapes in $NANODIFF_BASE_DIR, 24 + 24 images or `sizes`; with vectors_of(labels)."""
    with DatasetWriter(name, class_names, overwrite=overwrite) as writer:
        for split, n in ({"train": 24, "val": 24} | sizes).items():
            if n:
                images, labels = draw_shapes(n, seed=n, resolution=resolution)
                vectors = {"vectors": vectors_of(labels)} if vectors_of else {}
                writer.append(split, images, y=labels % max(1, len(class_names)), **vectors)


def make_optimizer(
    model,
    optimizer="muon",
    lr=3e-3,
    muon_lr=0.02,
    weight_decay=0.0,
    beta2=0.999,
    compile=False,
    dtype=torch.float32,
    grad_dtype=torch.float32,
):
    """As base_train does, by its defaults."""
    device = next(model.parameters()).device
    rules = {"muon": Muon(device, compile, dtype), "adamw": AdamW(beta2)}
    return Optimizer(model, param_groups(model, optimizer, lr, muon_lr, weight_decay), rules, grad_dtype)


def decode_png(data):
    """(H, W, C) uint8 of a file that encode_png wrote."""
    width, height = struct.unpack_from(">II", data, 16)
    at = data.index(b"IDAT")
    size = int.from_bytes(data[at - 4 : at])
    content = zlib.decompress(data[at + 4 : at + 4 + size])
    rows = np.frombuffer(content, np.uint8).reshape(height, -1)
    assert (rows[:, 0] == 1).all()  # PNG's filter 1: differences to the left
    differences = rows[:, 1:].reshape(height, width, -1)
    return differences.cumsum(1, dtype=np.uint8)  # modulo 256


def make_autoencoder(folder, seed=0, latent_channels=3):
    """A folder with an SD VAE of random weights and diffusers' file names: 4 pixels a side per latent."""
    folder.mkdir()
    torch.manual_seed(seed)
    weights = AutoencoderKL((8, 16, 16), 1, latent_channels, 4, True).state_dict()
    save_safetensors(weights, folder / "diffusion_pytorch_model.safetensors")
    (folder / "config.json").write_text(json.dumps({"_class_name": "AutoencoderKL", "norm_num_groups": 4}))
    return folder


def randomise(tensors, seed=0):
    """The same names and shapes with normal numbers, in place of initial weights of which half are zero."""
    g = torch.Generator().manual_seed(seed)
    random = {}
    for name, x in tensors.items():
        mean = 1.0 if x.ndim == 1 and "norm" in name else 0.0
        random[name] = mean + 0.1 * torch.randn(x.shape, generator=g)
    return random


def assert_identical(a, b, path=""):
    """Nested dicts of tensors and numbers, bit for bit."""
    assert type(a) is type(b), path
    if isinstance(a, dict):
        assert a.keys() == b.keys(), path
        for key in a:
            assert_identical(a[key], b[key], f"{path}/{key}")
    else:
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, path


def logged(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def metrics(base, tag):
    """What a run logged, without what depends on the clock."""
    clock = {"total_training_time_s", "train/dt_ms", "train/data_ms", "train/images_per_sec", "train/mfu"}
    return [{k: v for k, v in line.items() if k not in clock} for line in logged(base / "runs" / tag)]


def losses(base, tag):
    return [line["train/loss"] for line in metrics(base, tag) if "train/loss" in line]


def load(path):
    return load_tensors(path) if path.suffix == ".pt" else load_safetensors(path)[0]


def weights(base, tag, step=6):
    """{file: tensors} of a checkpoint."""
    folder = base / "runs" / tag / "checkpoints" / f"step_{step:06d}"
    return {path.name: load(path) for path in folder.iterdir() if path.suffix != ".json"}


def make_run(run_script, tag, *args):
    """Train `tag` for no step, then put random weights into its checkpoint 1; other ones for raw and averaged."""
    tiny = [arg for arg in TINY if not ("patch_size" in arg and "--arch=unet" in args)]
    run_dir = run_script("base_train", *tiny, *args, f"--model_tag={tag}")["run_dir"]
    first = run_dir / "checkpoints" / "step_000000"
    tensors = {p.stem: load(p) for p in first.iterdir() if p.suffix != ".json"}
    models = sorted(name for name in tensors if name == "model" or name.startswith("ema"))
    for i, name in enumerate(models):
        tensors[name] = randomise(tensors[name], seed=i)
    meta = load_meta(first)
    save_checkpoint(run_dir, 1, tensors, meta | {"step": 1, "loop": meta["loop"] | {"step": 1}})
    return run_dir


def run_script(name, *args):
    """As the fixture of this name, in a process that does nothing else."""
    sys.argv = [name, *args]
    done = runpy.run_module(f"scripts.{name}", run_name="__main__")
    done["lock"].close()
    return done


def make_runs():
    make_data()
    make_data("large", resolution=32)
    for tag, args in RUNS.items():
        make_run(run_script, tag, *args)


def assert_resumes(base, train, *args):
    """A run of 6 steps that loses its process after step 4, and all since, ends as one that does not."""
    train("base_train", *args, "--model_tag=whole")
    part = (*args, "--model_tag=parts", "--save_every=2", "--checkpoints_kept=-1")
    run_dir = train("base_train", *part)["run_dir"]
    shutil.rmtree(run_dir / "checkpoints" / "step_000006")
    assert train("base_train", *part)["start_step"] == 4
    assert metrics(base, "parts") == metrics(base, "whole")
    assert_identical(weights(base, "parts"), weights(base, "whole"))


def assert_ranks_agree(base, train, *args):
    """In the losses of all steps, by "two" and "one", which takes the batch as it comes."""
    train("base_train", *args, "--model_tag=one")
    run_process("base_train", *args, "--device_batch_size=4", "--model_tag=two", ranks=2)
    assert losses(base, "two") == pytest.approx(losses(base, "one"), rel=1e-4)
