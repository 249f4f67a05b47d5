"""The bench measures what it says: candidates in turn beside their reference, every part and every byte of a step."""

import io
import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import redirect_stdout

import pytest
import torch
import torch.distributed as dist
from processes import FORK, on_ranks
from tiny_runs import TINY, make_autoencoder, make_data

from nanodiff.common import UserError
from scripts import bench

SMALL = (
    "--patch_size=8 --image_size=16 --batch_sizes=2 --rounds=2 --steps=2 --depths=1 "
    "--compiles=False --dtypes=float32 --device_type=cpu --json"
).split()  # fmt: skip


@pytest.fixture
def run_bench(base, monkeypatch, capsys):
    """run_bench("--archs=dit") -> what it prints, its JSON parsed; the candidates are threads, which start faster."""
    before = dict(vars(bench))  # main overrides the settings

    def run(*args):
        for name, value in before.items():
            monkeypatch.setattr(bench, name, value)
        monkeypatch.setattr(sys, "argv", ["bench", *SMALL, *args])
        monkeypatch.setattr(bench, "new_process", lambda world: ThreadPoolExecutor(1))
        bench.main()
        told = capsys.readouterr()
        return json.loads(told.out) if told.out.startswith("{") else told.err + told.out

    return run


def check(rows):
    """A reference goes before all with which it shares depth and batch size; ratios are those of what is printed."""
    for row in rows:
        reference = row if row["reference"] else reference  # noqa: F821
        assert (row["depth"], row["batch_size"]) == (reference["depth"], reference["batch_size"])
        assert row["ratio"] == pytest.approx(row["images_per_sec"] / reference["images_per_sec"])
        assert row["images_per_sec"] == pytest.approx(1000 * row["world"] * row["batch_size"] / row["step_ms"])
        assert row["min_ms"] <= row["step_ms"] <= row["max_ms"] and row["memory_gb"] > 0.05


def test_every_combination_beside_its_reference(run_bench):
    rows = run_bench("--archs=dit", "--depth=1,2", "--batch_size=1,2", "--optimizers=adamw,muon", "--steps=1")["rows"]
    check(rows)
    candidates = [row for row in rows if not row["reference"]]
    assert len({row["what"] for row in candidates}) == len(candidates) == 2 * 2 * 2
    references = [(row["arch"], row["depth"], row["batch_size"]) for row in rows if row["reference"]]
    assert sorted(references) == [("dit_classic", depth, n) for depth in (1, 2) for n in (1, 2)]
    for row in rows:
        assert min(row[f"{part}_ms"] for part in ("forward", "backward", "optim", "ema")) > 0
        assert row["bytes_per_step"] == 0


def test_a_backbone_has_its_own_reference_or_the_first_candidate_is_the_measure(run_bench):
    rows = run_bench("--archs=dit,unet,dit_classic", "--rounds=1", "--steps=1")["rows"]
    check(rows)
    order = [("dit_classic", True), ("dit", False), ("dit_classic", False), ("unet", True), ("unet", False)]
    assert [(row["arch"], row["reference"]) for row in rows] == order
    rows = run_bench("--archs=dit", "--optimizers=adamw,muon", "--reference=False", "--rounds=1", "--steps=1")["rows"]
    assert [(row["optimizer"], row["reference"]) for row in rows] == [("adamw", False), ("muon", False)]
    assert [row["ratio"] for row in rows] == [row["images_per_sec"] / rows[0]["images_per_sec"] for row in rows]


def test_the_first_step_is_a_cold_one(run_bench, monkeypatch, tmp_path):
    """Parts are compiled in a cache of their own, empty at first; only from the third step on is the usual one seen."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    usual = []
    look = lambda *_: usual.append(os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path))
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **_: self.register_forward_pre_hook(look))
    rows = run_bench("--archs=dit", "--compiles=True", "--reference=False", "--rounds=1", "--steps=1")["rows"]
    assert usual[:4] == [False] * 4 and all(usual[4:])  # a block and the last norm
    assert rows[0]["first_step_s"] > rows[0]["warm_step_s"] > 0


def test_one_command_for_training_sampling_and_loading(run_bench, tmp_path):
    trace = tmp_path / "trace.json"
    make_data()
    args = "--archs=dit --sampling --loading --data=tiny --sample_steps=2 --json=False".split()
    text = run_bench(*args, f"--profile={trace}")
    heads = [line.split() for line in text.splitlines() if line.endswith("  what")]
    columns = "images_per_sec ratio first_step_s warm_step_s step_ms forward_ms optim_ms ema_ms data_ms memory_gb"
    for column in (columns + " sent_mb mfu").split():
        assert column in heads[0]
    assert len(heads) == 3 and text.count(", reference") == 2
    assert text.index("aten::") < text.index("\ntraining\n") < text.index("\nsampling\n") < text.index("\nloading\n")
    names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"aten::addmm", "aten::_fused_adamw_"} <= names


def test_real_data_and_latents(run_bench, base):
    make_data()
    rows = run_bench("--archs=dit", "--data=tiny", "--loading")["rows"]
    assert [row["table"] for row in rows] == ["training", "training", "loading"]
    check(rows[:2])
    fastest = max(row["images_per_sec"] for row in rows[:2])
    assert rows[2]["images_in_pass"] == 24 and "tiny" in rows[2]["what"]
    assert rows[2]["warm_ratio"] == pytest.approx(rows[2]["warm_images_per_sec"] / fastest)
    encoder = make_autoencoder(base / "vae")
    rows = run_bench("--archs=dit", f"--autoencoder={encoder}", "--image_size=64", "--checkpointing")["rows"]
    check(rows)
    ends = [row["what"].split("adamw, ")[1] for row in rows]
    fly, cached = "encoding on the fly", "cached latents"
    assert ends == [f"{fly}, reference", fly, f"checkpointing, {fly}", cached, f"checkpointing, {cached}"]


def test_rectangles_beside_their_square(run_bench):
    """Data in aspect buckets cost as much per pixel as squares; the model is that of the square."""
    rows = run_bench("--archs=dit", "--image_sizes=16,8x32", "--reference=False", "--sampling")["rows"]
    assert [(row["table"], row["image_size"]) for row in rows] == [
        ("training", 16), ("training", "8x32"), ("sampling", 16), ("sampling", "8x32"),
    ]  # fmt: skip
    assert rows[0]["num_params"] == rows[1]["num_params"]
    for square, other in (rows[:2], rows[2:]):
        assert square["ratio"] == 1 and "8x32 px" in other["what"]
        assert other["ratio"] == pytest.approx(other["images_per_sec"] / square["images_per_sec"])


@pytest.mark.parametrize(
    "arg, fault",
    [
        ("--depths=4,x", "depths='4,x'; accepted: >= 1, comma-separated"),
        ("--depth=0", "depths='0'; accepted"),
        ("--depth=1.5", "depths='1.5'; accepted"),
        ("--archs=dit,vit", "archs='dit,vit'; accepted: dit_classic.dit.unet"),
        ("--compiles=yes", "compiles='yes'; accepted: True.False"),
        ("--profile=/nowhere/trace.json", "profile='/nowhere/trace.json'; accepted: a file in a folder"),
        ("--data=nothing", "no data set 'nothing'"),
        ("--patch_size=3", "patch_size"),
        ("--image_sizes=8x32,16", "image_sizes='8x32,16'; accepted: a side, then"),
        ("--image_sizes=16,12x16", "the data hold 12x16; the model accepts multiples of 8"),
        ("--autoencoder=nowhere.pth", "nowhere.pth"),
    ],
)
def test_mistakes(run_bench, arg, fault):
    with pytest.raises(UserError, match=fault) as error:
        run_bench("--archs=dit", arg)
    assert len(str(error.value).splitlines()) == 1


def test_a_candidate_that_dies_ends_the_bench(monkeypatch):
    monkeypatch.setattr(bench, "new_process", lambda world: ProcessPoolExecutor(1, FORK))
    monkeypatch.setattr(bench, "candidate", lambda spec: os._exit(7))
    with pytest.raises(UserError, match="process died"):
        bench.measure([{}], 1)


@pytest.mark.slow
def test_two_ranks_take_part_and_one_prints(monkeypatch):
    def work(rank):
        with redirect_stdout(io.StringIO()) as out:
            bench.main()
        return out.getvalue()

    monkeypatch.setattr(sys, "argv", ["bench", *SMALL, "--archs=dit"])
    printed, nothing = on_ranks(work)
    rows = json.loads(printed)["rows"]
    check(rows)
    assert nothing == "" and [row["world"] for row in rows] == [2, 2]
    for row in rows:
        ring = 2 * 4 * row["num_params"] * (2 - 1) / 2
        assert ring <= row["bytes_per_step"] < (1 if row["reference"] else 1.2) * ring + 1


@pytest.mark.slow
@pytest.mark.parametrize("micro_steps", [1, 4])
def test_one_exchange_a_step_whatever_the_accumulation(base, run_script, micro_steps):
    """The collectives of 3 steps of the trainer, counted as torch is called."""
    make_data()
    sent = []  # (kind, bytes that a rank sends on a ring of two)

    def count(name, share):
        plain = getattr(dist, name, None)

        def counted(*args, **kwargs):
            sent.append((name.rpartition("_")[0], share(*args)))
            return plain(*args, **kwargs)

        if plain:
            setattr(dist, name, counted)

    def work(rank):
        for name in ("reduce_scatter_single", "reduce_scatter_tensor"):
            count(name, lambda out, full: out.nbytes)
        for name in ("all_gather_single", "all_gather_into_tensor"):
            count(name, lambda full, own: own.nbytes)
        count("all_reduce", lambda x, *op: x.nbytes)
        args = ["--num_iterations=3", "--save_every=-1", "--log_every=100", f"--device_batch_size={4 // micro_steps}"]
        done = run_script("base_train", *TINY, *args)
        assert done["grad_accum_steps"] == micro_steps and done["optimizer"] == "muon"
        optim, num_params = done["optim"], sum(p.numel() for p in done["raw_model"].parameters())
        kinds = [kind for kind, _ in sent]  # from the first step on: before, replicas are compared
        return sent[kinds.index("reduce_scatter") :], len(optim.buckets), optim.bytes_per_step, num_params

    (found, num_buckets, bytes_per_step, num_params), _ = on_ranks(work)
    for kind in ("reduce_scatter", "all_gather"):
        every = [nbytes for name, nbytes in found if name.startswith(kind)]
        assert len(every) == 3 * num_buckets and sum(every) == 3 * bytes_per_step / 2
    ring = 2 * 4 * num_params * (2 - 1) / 2
    assert ring <= bytes_per_step < 1.2 * ring
    small = [nbytes for name, nbytes in found if name == "all"]
    assert small[:3] == [4 * 2] * 3  # the norm and the wish to stop, once per step
    assert sum(small) < 3 * 1000  # and the line of the log
