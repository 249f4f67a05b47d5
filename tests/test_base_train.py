"""The trainer as a whole: the same model whatever the ranks and micro-batches, and whether stopped or not."""

import gc
import itertools
import json
import os
import re
import shutil
import signal
from functools import partial
from unittest.mock import Mock

import numpy as np
import pytest
import tiny_runs
import torch
from conftest import refused
from figures import inputs
from processes import run_process
from tiny_runs import assert_identical, assert_resumes, decode_png, losses, make_data, make_run, metrics, weights
from torch.testing import assert_close

from nanodiff.data.shapes import CLASS_NAMES, draw_shapes
from nanodiff.diffusion.flow import FlowMatching
from nanodiff.diffusion.gaussian import GaussianDiffusion
from nanodiff.dist import StopSignal
from nanodiff.formats.load import load_run
from nanodiff.models import build
from nanodiff.training import optim
from nanodiff.training.checkpoint import list_checkpoints, load_meta
from nanodiff.training.ema import EMA
from nanodiff.training.log import Meter

# Small, and all that could go wrong in a resume: accumulation, an average, flips, an epoch that ends within the run
TINY = "--data=tiny --depth=1 --patch_size=4 --total_batch_size=16 --num_iterations=6 --log_every=1 --flip"
TINY = [*TINY.split(), "--eval_every=3", "--eval_images=20", *tiny_runs.PLAIN]


@pytest.fixture
def tiny(base):
    """A data set of 72 images, so that an epoch ends in mid-step."""
    make_data(train=72)
    return base


@pytest.mark.parametrize(
    "more",
    [
        ("--optimizer=muon", "--dtype=bfloat16", "--deterministic"),
        # The last log line begins before the stop
        ("--objective=eps", "--optimizer=adamw", "--ema_rates=0.9,0.99", "--log_every=3"),
    ],
)
def test_a_stopped_and_resumed_run_is_bit_identical(tiny, run_script, more):
    assert_resumes(tiny, run_script, *TINY, *more, "--device_batch_size=8")
    assert not torch.are_deterministic_algorithms_enabled()  # a CPU needs none of it


@pytest.mark.slow
@pytest.mark.parametrize("more", ["", "--objective=eps --variance=learned_range --timesteps=loss-second-moment"])
def test_two_ranks_train_the_same_model_as_one(tiny, run_script, more):
    grid = ("--sample_every=0", "--sample_steps=2")
    tiny_runs.assert_ranks_agree(tiny, run_script, *TINY, *more.split(), *grid)
    grid_of = lambda tag: decode_png((tiny / "runs" / tag / "samples" / "step_000006.png").read_bytes())
    difference = grid_of("one").astype(int) - grid_of("two")
    assert np.abs(difference).mean() < 1  # each rank drew half of it; two steps of DDIM enlarge rounding in places


def test_horizons(tiny, run_script):
    """Steps follow from FLOPs, epochs or tokens per parameter, by the arithmetic that is printed; one at least."""
    args = [arg for arg in TINY if "num_iterations" not in arg] + ["--eval_every=-1", "--save_every=-1"]
    a = run_script("base_train", *args, "--target_flops=1e9", "--model_tag=a")
    assert abs(a["step"] * 16 * a["flops_per_image"] - 1e9) <= 8 * a["flops_per_image"]
    b = run_script("base_train", *args, "--target_param_data_ratio=0.005", "--model_tag=b")
    assert abs(b["step"] * 16 * 16 - 0.005 * b["num_params"]) <= 8 * 16  # 16 tokens an image
    for epochs, steps in (
        (2.5, round(2.5 * 72 / 16)),
        (0.001, 1),
    ):
        c = run_script("base_train", *args, f"--num_epochs={epochs}", f"--model_tag=c{steps}")
        assert c["step"] == steps


def test_the_batch_follows_the_horizon(tiny, run_script, capsys):
    """64 images for 20 million tokens, and both as its root; a resumed run keeps batch and rates."""
    args = [arg for arg in TINY if "num_iterations" not in arg and "total_batch_size" not in arg]
    args += ["--eval_every=-1"]
    for tokens, batch in (
        (1.25e6, 16),
        (20e6, 64),
    ):
        more = (f"--num_epochs={tokens / 16 / 72}", "--save_every=-1", f"--model_tag=t{batch}")
        assert f" x {batch} images: " in set_up(run_script, capsys, *args, *more)
    done = run_script("base_train", *args, "--num_iterations=2")
    assert done["total_batch_size"] == 16
    assert done["lr"] == 0.003 * 4 / 2
    assert done["config"]["lr"] == done["lr"]
    # though 20 million tokens would choose 64 images
    out = set_up(run_script, capsys, *args, f"--num_epochs={20e6 / 16 / 72}", "--resume=changed")
    assert "lr 0.006, muon_lr 0.0141 (if not given, as before)" in out
    assert "x 16 images" in out
    refused("total_batch_size=32", run_script, "base_train", *args, "--num_iterations=9", "--total_batch_size=32")


@pytest.mark.parametrize(
    "batch, steps, adamw, muon",
    [
        (16, 0, 0.5, 0.5**0.5),
        (64, 2000, 1, 1),
        (64, 8000, 1, 0.5),
        (1024, 3, 4, 2),
    ],
)
def test_rates_follow_batch_width_and_steps_unless_given(tiny, run_script, capsys, batch, steps, adamw, muon):
    """AdamW's as the batch's root and by the width; Muon's as its fourth root, in long runs by the steps."""
    args = (*TINY, f"--total_batch_size={batch}", f"--num_iterations={steps}", "--save_every=-1")
    rates = f"lr {0.003 * adamw * 4:.3g}, muon_lr {0.02 * muon:.3g} (if not given, by batch, width and steps)"
    assert rates in set_up(run_script, capsys, *args)
    assert "lr 0.5, muon_lr 0.7 " in set_up(run_script, capsys, *args, "--lr=0.5", "--muon_lr=0.7")


@pytest.mark.parametrize("ranks", [3, 7])
def test_the_batch_is_a_multiple_of_any_number_of_ranks(tiny, run_script, capsys, monkeypatch, ranks):
    args = [arg for arg in TINY if "total_batch_size" not in arg] + ["--save_every=-1", "--num_iterations=-1"]
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("nanodiff.training.checkpoint.from_first_rank", lambda value, what: value)
    monkeypatch.setattr("nanodiff.device.compare_ranks", lambda config: None)
    out = set_up(run_script, capsys, *args, "--num_epochs=100")
    total = int(re.search(r"x (\d+) images: ", out)[1])
    assert total % ranks == 0
    assert abs(total - 16) <= ranks / 2


def set_up(run_script, capsys, *args):
    """What base_train prints up to the cut of the batch."""
    capsys.readouterr()
    with pytest.raises(KeyboardInterrupt), pytest.MonkeyPatch.context() as patch:
        patch.setattr("nanodiff.training.optim.param_groups", Mock(side_effect=KeyboardInterrupt))
        run_script("base_train", *args)
    gc.collect()  # the frames of the interrupt hold the run's lock
    return capsys.readouterr().out


def steps_of(base, tag, key):
    return [line["step"] for line in metrics(base, tag) if key in line]


def test_the_untrained_model_is_validated_too(tiny, run_script):
    """At step 0, from which eval_every counts; 0 = only at the end, -1 = never. A run of no steps has one figure."""
    args = (*TINY, "--save_every=-1", "--log_every=6")
    for every, steps in (
        (3, [0, 3, 6]),
        (0, [6]),
        (-1, []),
    ):
        run_script("base_train", *args, f"--eval_every={every}", f"--model_tag=every{every}")
        assert steps_of(tiny, f"every{every}", "val/loss") == steps
    run_script("base_train", *args, "--num_iterations=0", "--model_tag=none")
    (untrained,) = metrics(tiny, "none")
    assert metrics(tiny, "every3")[0] == untrained
    assert untrained["val/loss"] == untrained["val/loss_ema"]


def lose_the_average():
    """Before a script: after step 3 the average is NaN. The weights stay as they are."""

    def update(self, step):
        honest(self, step)
        if step == 3:
            self.averages[self.rates[0]][0].fill_(float("nan"))

    honest = EMA.update
    EMA.update = update


@pytest.mark.parametrize(
    "more, line",
    [
        ("--eval_every=-1", r"step 4: ema_0\.999: \S+ is not finite; earlier checkpoints are intact"),
        ("--eval_every=3", "step 3: val/loss_ema is nan; give "),
        ("--sample_every=3 --sample_steps=1 --eval_every=-1", "64 of 64 samples are not finite"),
    ],
)
def test_an_average_that_is_not_finite_ends_the_run_and_deletes_nothing(tiny, run_script, more, line):
    args = (*TINY, *more.split(), "--save_every=2", "--checkpoints_kept=1", "--model_tag=a")
    done = run_process("base_train", *args, check=False, before=lose_the_average)
    assert done.returncode == 1, done.stderr
    assert re.search(f"^error: {line}", done.stderr, re.M), done.stderr
    assert "Traceback" not in done.stderr
    assert [step for step, _ in list_checkpoints(tiny / "runs" / "a")] == [2]
    assert run_script("base_train", *args)["start_step"] == 2


def test_what_is_derived_is_recorded(tiny, run_script, monkeypatch):
    """So a run in bf16 is not taken on in fp32 by a machine on which "auto" means that."""
    args = [arg for arg in TINY if not arg.startswith("--dtype")]
    args += ["--num_iterations=2", "--device_type=cpu", "--model_tag=a", "--save_every=1", "--checkpoints_kept=-1"]
    has_bf16 = "torch.cpu._is_avx512_bf16_supported"
    monkeypatch.setattr(has_bf16, lambda: True)
    products = []
    monkeypatch.setattr(optim, "polar_express", lambda X: products.append(X.dtype) or X)
    run_dir = run_script("base_train", *args)["run_dir"]
    recorded = {"dtype": "bfloat16", "device_batch_size": 16}
    last = run_dir / "checkpoints" / "step_000002"
    config = json.loads((run_dir / "config.json").read_text())
    saved = load_meta(last)["config"]
    assert config["config"].items() >= saved.items()
    assert saved.items() >= recorded.items()
    shutil.rmtree(last)
    assert run_script("base_train", *args)["start_step"] == 1  # the same command goes on
    assert not json.loads((run_dir / "config.json").read_text())["changes"]
    monkeypatch.setattr(has_bf16, lambda: False)
    refused(r"dtype='float32' \(was 'bfloat16'\); give --model_tag", run_script, "base_train", *args)
    assert {*products} == {torch.bfloat16}  # Muon's, too
    run_script("base_train", *args, "--num_iterations=3", "--resume=changed", "--device_batch_size=8")
    (change,) = json.loads((run_dir / "config.json").read_text())["changes"]
    assert change["config"].items() >= {"dtype": "float32", "device_batch_size": 8}.items()
    assert products[-1] == torch.float32


def test_a_horizon_behind_the_checkpoint_loses_nothing(tiny, run_script):
    """It would train on for ever at a negative rate and delete the good checkpoints; 0 evaluates what there is."""
    args = [*TINY, "--model_tag=base"]
    run_dir = run_script("base_train", *args)["run_dir"]
    before = sorted(run_dir.rglob("*"))
    behind = ("--num_iterations=4", "--resume=changed")
    refused("num_iterations=4: .*is at step 6; accepted: 6 or more", run_script, "base_train", *args, *behind)
    assert sorted(run_dir.rglob("*")) == before
    for resume in ("auto", "changed"):
        more = ("--num_iterations=0", f"--resume={resume}", "--sample_every=0", "--sample_steps=1")
        assert run_script("base_train", *args, *more)["step"] == 6
    assert (run_dir / "samples" / "step_000006.png").exists()
    # the run's own command still ends where it ended, and what makes no difference needs no word
    assert run_script("base_train", *args, "--log_every=2")["step"] == 6


def test_a_set_without_validation_split_trains(base, run_script, capsys):
    make_data(val=0)
    run_script("base_train", *TINY, "--num_iterations=2", "--sample_every=0", "--sample_steps=2", "--low_res_size=8")
    assert capsys.readouterr().out.count("no validation split") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        "--arch=unet --num_res_blocks=1 --low_res_size=8",
        "--arch=unet --num_res_blocks=1 --objective=v --dropout=0.1 --class_cond=False",
        "--arch=dit_classic --objective=eps --variance=learned_range --gaussian_loss=rescaled_kl "
        "--timesteps=loss-second-moment",
        "--low_res_size=4 --objective=x_prev --variance=learned --sampler=ddpm --sample_steps=25",
        "--objective=x0 --noise_schedule=linear --variance=fixed_large --ema_rates= --checkpointing",
    ],
)
def test_every_kind_of_model_trains_samples_and_resumes(tiny, run_script, more):
    """One step, a grid, and one more step after a resume equal two steps in one go, dropout included."""
    args = [arg for arg in TINY if not ("patch_size" in arg and "--arch=unet" in more)]
    args += ["--total_batch_size=8", "--warmup_ratio=0", "--warmdown_ratio=0", "--sample_steps=2", *more.split()]
    if "--objective" in more:
        args.append("--num_timesteps=25")
    end = ("--eval_every=0", "--eval_images=4", "--sample_every=0")
    run_script("base_train", *args, *end, "--num_iterations=1", "--model_tag=a")
    run_script("base_train", *args, "--eval_every=-1", "--num_iterations=2", "--resume=changed", "--model_tag=a")
    run_script("base_train", *args, "--eval_every=-1", "--num_iterations=2", "--model_tag=b")
    assert_identical(weights(tiny, "a", 2), weights(tiny, "b", 2))
    assert (tiny / "runs" / "a" / "samples" / "step_000001.png").stat().st_size > 1000


def losses_with_overflow(process, n):
    """Losses of a process of which that of call n, from 0, is infinite."""
    honest = process.losses
    scales = iter([1] * n + [float("inf")])

    def losses(*args, **kwargs):
        terms = honest(*args, **kwargs)
        return {"loss": terms["loss"] * next(scales, 1)}

    return losses


def overflow_once():
    """Before a script: the sixth loss of rank 1 is infinite."""
    if os.environ["RANK"] == "1":
        FlowMatching.losses = losses_with_overflow(FlowMatching, 5)


@pytest.mark.slow
def test_an_overflow_on_one_rank_of_two(tiny):
    """In fp16 both ranks skip the step and go on alike; in fp32 the run ends, and says in which parameter."""
    args = (*TINY, "--num_iterations=8", "--eval_every=-1", "--warmup_ratio=0", "--device_batch_size=8")
    two = dict(ranks=2, before=overflow_once)
    more = ("--dtype=float16", "--save_every=1", "--checkpoints_kept=-1")
    run_process("base_train", *args, *more, "--model_tag=a", **two)
    scale = [line["train/lg_loss_scale"] for line in metrics(tiny, "a")]
    assert np.diff(scale)[3:] == pytest.approx([0.001, -1, 0.001, 0.001])  # the first ones are too large for fp16
    before = weights(tiny, "a", 5)
    skipped = weights(tiny, "a", 6)
    after = weights(tiny, "a", 7)
    assert_identical(before["model.safetensors"], skipped["model.safetensors"])
    assert_identical(before["optim.pt"], skipped["optim.pt"])
    last = "final.linear.weight"
    assert not torch.equal(skipped["model.safetensors"][last], after["model.safetensors"][last])
    end = weights(tiny, "a", 8)
    for x in end["model.safetensors"].values():
        assert x.isfinite().all()

    done = run_process("base_train", *args, "--model_tag=b", "--save_every=1", check=False, **two)
    assert done.returncode != 0
    assert "step 5: loss" in done.stderr
    assert "gradient not finite (100% of " in done.stderr
    assert weights(tiny, "b", 5)["model.safetensors"][last].isfinite().all()


def wrong_code(process, calls):
    """Before a script: it takes eager code for compiled code, some of whose first losses are infinite."""
    import torch._dynamo  # as a compiled model does

    build.compiled = lambda model, *_: model

    losses = process.losses
    number = itertools.count()

    def wrong_losses(*args, **kwargs):
        terms = losses(*args, **kwargs)
        is_wrong = torch.is_grad_enabled() and next(number) in calls  # in training
        return terms | {"loss": terms["loss"] * (float("inf") if is_wrong else 1)}

    process.losses = wrong_losses


REPEATED = "compiled code may be wrong; repeated uncompiled"


@pytest.mark.parametrize(
    "process, more",
    [
        (FlowMatching, "--optimizer=muon"),
        (GaussianDiffusion, "--objective=eps --num_timesteps=2 --timesteps=loss-second-moment"),
    ],
)
def test_a_nan_of_compiled_code_costs_one_step_in_eager_code_and_no_bit(tiny, more, process):
    """No weight, state, average, law of t or line of the log knows of it; from then on nothing is compiled."""
    args = (*TINY, "--compile=True", *more.split(), "--device_batch_size=8", "--eval_every=2", "--log_every=4")
    for tag, calls in (("whole", ()), ("a", (5,))):
        done = run_process("base_train", *args, f"--model_tag={tag}", before=partial(wrong_code, process, calls))
        assert done.stdout.count(REPEATED) == len(calls)
    assert "step 2: loss inf, gradient not finite (100% of " in done.stdout
    assert metrics(tiny, "a") == metrics(tiny, "whole")
    assert_identical(weights(tiny, "a"), weights(tiny, "whole"))


def test_a_nan_of_eager_code_too_ends_the_run(tiny):
    args = (*TINY, "--compile=True", "--eval_every=-1", "--model_tag=a")
    done = run_process("base_train", *args, check=False, before=partial(wrong_code, FlowMatching, (3, 4)))
    assert done.stdout.count(REPEATED) == 1
    assert re.search("^error: step 3: loss inf, gradient not finite .*--resume=STEP", done.stderr, re.M), done.stderr


def test_a_nan_of_a_run_that_compiles_nothing_is_not_blamed_on_compiled_code(tiny):
    """Checkpointing imports the compiler."""
    args = (*TINY, "--checkpointing", "--eval_every=-1", "--model_tag=a")
    done = run_process("base_train", *args, check=False, before=partial(wrong_code, FlowMatching, (3, 4)))
    assert REPEATED not in done.stdout
    assert "error: step 3: loss inf, gradient not finite" in done.stderr


def wrong_code_on_one_rank():
    """Before a script: the sixth loss of rank 1."""
    wrong_code(FlowMatching, (5,) if os.environ["RANK"] == "1" else ())


@pytest.mark.slow
def test_a_nan_of_one_ranks_compiled_code_is_repeated_by_both(tiny):
    args = (*TINY, "--compile=True", "--eval_every=-1", "--device_batch_size=4")
    run_process("base_train", *args, "--model_tag=a", ranks=2, before=wrong_code_on_one_rank)
    run_process("base_train", *args, "--model_tag=whole", ranks=2, before=partial(wrong_code, FlowMatching, ()))
    assert metrics(tiny, "a") == metrics(tiny, "whole")
    assert_identical(weights(tiny, "a"), weights(tiny, "whole"))


def test_a_skipped_step_teaches_loss_second_moment_nothing(tiny, run_script, monkeypatch):
    """The loss of a step that fp16 overflows may be infinite, and would stay in the history."""
    monkeypatch.setattr(GaussianDiffusion, "losses", losses_with_overflow(GaussianDiffusion, 2))
    args = ("--objective=eps", "--num_timesteps=2", "--timesteps=loss-second-moment", "--dtype=float16")
    done = run_script("base_train", *TINY, *args, "--num_iterations=8", "--eval_every=-1")
    assert done["t_distribution"].history.isfinite().all()
    assert 0 < done["optim"].steps < 8


def train_twice_with_wandb():
    for iterations in (2, 3):
        more = (f"--num_iterations={iterations}", "--resume=changed", "--sample_every=0", "--sample_steps=2")
        tiny_runs.run_script("base_train", *TINY, *more, "--run=offline", "--model_tag=a")


@pytest.mark.slow
def test_wandb_offline_and_the_same_run_after_a_resume(tiny):
    """The real library, without a network and without an account; pictures do not need Pillow."""
    pytest.importorskip("wandb")
    run_process(train_twice_with_wandb, WANDB_MODE="offline", WANDB_SILENT="true")
    run_dir = tiny / "runs" / "a"
    kept = sorted((run_dir / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(kept) == 2
    assert kept[0].name == kept[1].name
    wandb_id = kept[0].stem.removeprefix("run-")
    metas = [json.loads(path.read_text()) for path in run_dir.glob("checkpoints/*/meta.json")]
    assert [meta["loop"]["wandb_id"] for meta in metas] == [wandb_id, wandb_id]


def test_a_run_of_forty_steps(tiny, run_script):
    """It learns, at a rate that warms up and down, in micro-batches of 64 at most, with few evaluations and saves."""
    args = ("--num_iterations=40", "--warmup_ratio=0.1", "--warmdown_ratio=0.4", "--total_batch_size=96")
    done = run_script("base_train", *TINY, *args)
    assert done["device_batch_size"] == 48  # a divisor
    lrm = [line["train/lrm"] for line in metrics(tiny, "tiny_dit_d1") if "train/lrm" in line]
    expected = [min((i + 1) / 5, 1, (40 - i) / 16) for i in range(40)]
    assert lrm == pytest.approx(expected)
    loss = losses(tiny, "tiny_dit_d1")
    assert loss[0] < 1.9  # v = noise - x0 has variance 1 + var(x0) for a model that knows nothing
    assert loss[-1] < loss[0]


def test_changed_settings_and_data(tiny, run_script, capsys):
    """Settings change on request, but for those that make the model; what is refused does not touch the run."""
    args = (*TINY, "--model_tag=a")
    first = run_script("base_train", *args)["run_dir"]
    names = ("config.json", "metrics.jsonl", "report.html")
    before = {name: (first / name).read_bytes() for name in names}
    refused(r"lr=0\.01 \(was 0\.006\); give --model_tag", run_script, "base_train", *args, "--lr=0.01")
    other = ("--depth=2", "--objective=eps", "--lr=0.1", "--resume=changed")
    refused(r"depth=2 \(was 1\), objective='eps' \(was 'flow'\)", run_script, "base_train", *args, *other)
    assert before == {name: (first / name).read_bytes() for name in names}
    changed = ("--lr=0.01", "--num_iterations=7", "--guided_from=0.5", "--eval_every=-1")
    assert run_script("base_train", *args, *changed, "--resume=changed")["step"] == 7
    assert len(losses(tiny, "a")) == 7
    config = json.loads((first / "config.json").read_text())
    changes = {"lr": 0.01, "num_iterations": 7, "guided_from": 0.5, "eval_every": -1}
    assert config["config"]["lr"] == 0.006
    assert config["changes"][0]["config"].items() >= changes.items()
    moved = first.parents[1] / "moved"
    (first.parents[1] / "data" / "tiny").rename(moved)
    run_script("base_train", *args, *changed, f"--data={moved}", "--resume=changed")
    make_data(train=72, val=25)
    assert "validation split has changed" not in capsys.readouterr().out
    run_script("base_train", *args, *changed, "--resume=changed")
    assert "the validation split has changed since the run began" in capsys.readouterr().out
    make_data(train=73, overwrite=True)
    refused("other sha256", run_script, "base_train", *args, *changed, "--resume=changed")


def stopped(run_script, *args):
    """A run that SIGTERM ends."""
    with pytest.raises(SystemExit) as end:
        run_script("base_train", *args)
    assert end.value.code == 128 + signal.SIGTERM
    del end
    gc.unfreeze()
    gc.collect()  # the frames of the exit hold the run's lock


@pytest.mark.parametrize(
    "place, every",
    [
        ("training.validation.held_out", "--eval_every=3"),
        ("sampling.draw.make_denoiser", "--sample_every=3"),
        ("sampling.draw.make_denoiser", "--fid_every=3"),
    ],
)
def test_a_signal_in_an_evaluation_drops_and_repeats_it(tiny, run_script, monkeypatch, capfd, place, every):
    """It is obeyed at once, the step is saved, and the resumed run has the bits of one that was not stopped."""
    more = ("--save_every=0", "--eval_every=-1", "--sample_steps=2", "--fid_metric=fd_simclr", "--fid_images=10")
    args = (*TINY, *more, every)
    run_script("base_train", *args, "--model_tag=whole")
    calls = []
    listen = StopSignal.listen

    def kill(*_):
        calls.append("once")
        os.kill(os.getpid(), signal.SIGTERM)
        calls.append("not reached")

    def kill_from_now_on(self):
        listen(self)
        patch.setattr(f"nanodiff.{place}", kill)

    with monkeypatch.context() as patch:
        patch.setattr(StopSignal, "listen", kill_from_now_on)
        stopped(run_script, *args, "--model_tag=parts")
    assert calls == ["once"]
    assert "SIGTERM: dropping this step or evaluation, then saving and leaving" in capfd.readouterr().err
    assert [step for step, _ in list_checkpoints(tiny / "runs" / "parts")] == [3]
    for line in metrics(tiny, "parts"):
        assert line["step"] == 0 or not any("val" in key for key in line)
    assert run_script("base_train", *args, "--model_tag=parts")["start_step"] == 3
    assert metrics(tiny, "parts") == metrics(tiny, "whole")
    assert_identical(weights(tiny, "parts"), weights(tiny, "whole"))


def test_a_signal_drops_the_rest_of_a_step_which_is_repeated(tiny, run_script, monkeypatch):
    """In the third of eight passes: no other follows, and the resumed run has the bits of one that was not stopped."""
    args = (*TINY, "--device_batch_size=2", "--eval_every=-1", "--save_every=0", "--log_every=5")
    run_script("base_train", *args, "--model_tag=whole")
    losses = FlowMatching.losses
    passes = itertools.count(1)

    def kill_once(*args, **kwargs):
        if next(passes) == 3 * 8 + 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return losses(*args, **kwargs)

    monkeypatch.setattr(FlowMatching, "losses", kill_once)
    stopped(run_script, *args, "--model_tag=parts")
    assert next(passes) == 3 * 8 + 4
    assert [step for step, _ in list_checkpoints(tiny / "runs" / "parts")] == [3]
    assert run_script("base_train", *args, "--model_tag=parts")["start_step"] == 3
    assert metrics(tiny, "parts") == metrics(tiny, "whole")
    assert_identical(weights(tiny, "parts"), weights(tiny, "whole"))


def test_going_back_puts_the_other_branch_aside_and_survives_a_kill(tiny, run_script, monkeypatch):
    """The same command goes on with its own branch, which is what "newest" means; another command goes back again."""
    args = (*TINY, "--model_tag=a", "--save_every=2", "--checkpoints_kept=-1", "--eval_every=2")
    back = (*args, "--resume=2", "--lr=0.01")
    run_script("base_train", *args)
    lines = metrics(tiny, "a")
    steps = lambda tag: [step for step, _ in list_checkpoints(tiny / "runs" / tag)]
    refused("other settings", run_script, "base_train", *back, "--depth=2")
    gc.collect()
    assert steps("a") == [2, 4, 6]  # what is refused changes nothing
    with monkeypatch.context() as patch:
        honest = Meter.console

        def console(self, line, num_iterations):
            if line["step"] == 4:
                os.kill(os.getpid(), signal.SIGTERM)
            return honest(self, line, num_iterations)

        patch.setattr(Meter, "console", console)
        stopped(run_script, *back)
    (left,) = (tiny / "runs").glob("a.left_*")
    assert steps("a") == [2, 4]
    assert {path.stem for path in left.iterdir()} >= {"step_000004", "step_000006"}
    assert (left / "metrics.jsonl").read_text().count("\n") == len(lines)
    assert run_script("base_train", *back)["start_step"] == 4
    assert run_script("base_train", *args, "--lr=0.01", "--resume=changed")["start_step"] == 6
    assert steps_of(tiny, "a", "train/loss") == [1, 2, 3, 4, 5, 6]
    assert metrics(tiny, "a")[:3] == lines[:3]
    assert metrics(tiny, "a")[3:] != lines[3:]
    run_script("base_train", *TINY, "--model_tag=a", "--lr=0.01", "--num_iterations=0")
    assert steps("a") == [2, 4, 6]  # kept on purpose, and nothing was saved since
    (tiny / "runs" / "a" / "eval_loss_000006_ema=raw.json").write_text('{"metric": "loss", "loss": 1.0}')
    assert run_script("base_train", *args, "--resume=2", "--lr=0.02")["start_step"] == 2
    assert steps("a") == [2, 4, 6]
    assert len([*(tiny / "runs").glob("a.left_*/step_*6")]) == 2
    (evaluation,) = (tiny / "runs").glob("*/eval_*")
    assert evaluation.parent.name.startswith("a.left_")
    (tiny / "runs" / "a" / "metrics.jsonl").unlink()  # by a user
    assert run_script("base_train", *args, "--resume=2", "--lr=0.03")["start_step"] == 2


def test_a_new_run_in_an_old_folder_shows_nothing_of_the_old(tiny, run_script, capsys):
    args = (*TINY, "--model_tag=a", "--sample_every=2", "--eval_every=2")
    run_script("base_train", *args, "--save_every=-1")
    lines = metrics(tiny, "a")
    run_script("base_train", *args, "--objective=eps", "--num_iterations=2")
    assert "back at step 0: later checkpoints, grids and the log are now in" in capsys.readouterr().out
    assert {path.stem for path in (tiny / "runs" / "a" / "samples").glob("*.png")} == {"step_000002"}
    assert steps_of(tiny, "a", "train/loss") == [1, 2]
    (left,) = (tiny / "runs").glob("a.left_*")
    assert {path.stem for path in left.glob("*.png")} == {"step_000002", "step_000004", "step_000006"}
    assert (left / "metrics.jsonl").read_text().count("\n") == len(lines)


def test_an_average_can_be_added_when_resuming(tiny, run_script, capsys):
    args = (*TINY, "--ema_ramp=False")
    run_script("base_train", *args, "--ema_rates=0.9")
    run_script("base_train", *args, "--ema_rates=0.9,0.5", "--num_iterations=7", "--resume=changed")
    assert "the average 0.5 is new" in capsys.readouterr().out
    old = weights(tiny, "tiny_dit_d1")
    new = weights(tiny, "tiny_dit_d1", step=7)
    for name, average in new["ema_0.5.safetensors"].items():
        before = old["model.safetensors"][name]
        after = new["model.safetensors"][name]
        assert_close(average, before.lerp(after, 0.5))


@pytest.mark.parametrize(
    "more",
    [
        (),
        ("--arch=unet", "--num_res_blocks=1", "--patch_size=0"),
    ],
)
def test_init_from_equals_its_source_and_trains_only_what_it_should(tiny, run_script, more):
    make_run(run_script, "source", *more)  # random weights, on the set "tiny"
    start = ("--init_from=source", "--model_tag=tuned", "--eval_every=-1", *more)
    args = [arg for arg in TINY if not (more and "patch_size=4" in arg)]
    run_script("base_train", *args, *start, "--num_iterations=0")
    source = load_run("source", "cpu")
    tuned = load_run("tuned", "cpu")
    assert_identical(tuned.model.state_dict(), source.model.state_dict())
    last = "out.2" if more else "final"
    part = f"--trainable={last}"
    run_script("base_train", *args, *start, part, "--num_iterations=2", "--model_tag=part")
    trained = load_run("part", "cpu").model.state_dict()
    changed = [name for name, x in source.model.state_dict().items() if not torch.equal(x, trained[name])]
    assert changed
    for name in changed:
        assert last in name
    refused("trainable='nose'", run_script, "base_train", *args, *start, "--trainable=nose", "--model_tag=other")
    start += ("--model_tag=other",)
    refused("another shape; to start from it: .*--depth=1", run_script, "base_train", *args, *start, "--depth=2")
    done = run_script("base_train", *args, *start, "--class_cond=False", "--num_iterations=0")
    without_classes = done["raw_model"].eval()
    x, t, _ = inputs()
    null = torch.full((len(x),), 8)
    assert_close(without_classes(x, t), source.model(x, t, null))  # goes on as the null class
    make_data("other", class_names=["star", "bar"])
    start += ("--data=other", "--model_tag=new")
    refused("freezes .* has new classes", run_script, "base_train", *args, *start, part)


@pytest.mark.slow
def test_a_few_steps_of_tuning_do_no_harm(base, run_script):
    """20 on the model's own data; at the rates of training from scratch its loss rises by 6%."""
    make_data(train=512, val=128)
    tiny = [arg for arg in TINY if arg not in ("--flip", "--eval_every=3")]
    tiny += ["--eval_every=0", "--eval_images=128"]
    run_script("base_train", *tiny, "--num_iterations=300", "--model_tag=source")
    run_script("base_train", *tiny, "--num_iterations=20", "--init_from=source", "--model_tag=tuned")
    before = metrics(base, "source")[-1]["val/loss_ema"]
    after = metrics(base, "tuned")[-1]["val/loss_ema"]
    assert after < 1.02 * before


def test_rows_of_the_class_table_follow_the_names(tiny, run_script):
    """Known names take their rows wherever they stand; others start as the null class, which is kept."""
    make_run(run_script, "source")
    names = ["cross", "banana", *CLASS_NAMES[:2]]
    make_data("fruit", class_names=names, train=32, val=0)
    run_script("base_train", *TINY, "--data=fruit", "--init_from=source", "--model_tag=b", "--num_iterations=0")
    old = load_run("source", "cpu").model.y_embed.weight
    new = load_run("b", "cpu").model.y_embed.weight
    for row, name in enumerate(names):
        equal = [k for k in range(len(old)) if torch.equal(new[row], old[k])]
        expected = CLASS_NAMES.index(name) if name in CLASS_NAMES else len(old) - 1
        assert equal == [expected]
    assert torch.equal(new[-1], old[-1])


def test_a_source_brings_shape_and_process_and_may_go(tiny, run_script):
    """Of the run's own command nothing else is needed, and a resumed run needs no source, except a teacher."""
    make_run(run_script, "source", "--width=128", "--timestep_shift=2", "--label_drop=0.3")
    args = [arg for arg in TINY if not arg.startswith(("--depth", "--patch_size"))] + ["--init_from=source"]
    done = run_script("base_train", *args, "--num_iterations=2")
    assert done["raw_model"].config == load_run("source", "cpu").model.config
    assert done["model_tag"] == "source_tiny"
    assert done["timestep_shift"] == 2
    assert done["label_drop"] == 0.3
    jumps = (*args, "--objective=flow_map", "--model_tag=map")
    run_script("base_train", *jumps, "--num_iterations=2")
    shutil.move(tiny / "runs" / "source", tiny / "source")
    done = run_script("base_train", *args, "--resume=changed")
    assert done["start_step"] == 2
    assert done["step"] == 6
    assert done["timestep_shift"] == 2
    refused("'source' is no folder, file or tag", run_script, "base_train", *jumps, "--resume=changed")
    refused(r"trained with other settings: depth=3 \(was 1\)", run_script, "base_train", *args, "--depth=3")


def test_larger_images_get_more_noise(base, run_script):
    """From 32 pixels on t is shifted by the side; a shift that was given stays, as rates do, when a run resumes."""
    for resolution, shift in ((16, 1), (48, 1.5)):
        make_data(f"side{resolution}", resolution=resolution)
        args = [*TINY, f"--data=side{resolution}", "--num_iterations=1", f"--model_tag=side{resolution}"]
        assert run_script("base_train", *args)["process"].timestep_shift == shift
        assert load_run(f"side{resolution}", "cpu").process.timestep_shift == shift
    run_script("base_train", *args, "--timestep_shift=1.2", "--resume=never", "--model_tag=given")
    done = run_script("base_train", *args, "--num_iterations=2", "--resume=changed", "--model_tag=given")
    assert done["process"].timestep_shift == 1.2


@pytest.mark.slow
def test_the_velocity_is_known_where_samples_start(base, run_script):
    """With wider t its error at t = 1 is at most 1.15 times that at 0.95; by default 1.4 times."""
    small = "--depth=2 --width=64 --patch_size=4 --total_batch_size=64 --num_iterations=120 --compile=False".split()
    small += ["--timestep_std=1.4", "--lr=0.012", "--eval_every=-1", "--sample_every=-1", "--device_type=cpu"]
    done = run_script("base_train", *small)
    images, labels = draw_shapes(256, (0, 1), 16)
    x0 = torch.from_numpy(images).float() / 127.5 - 1
    y = torch.from_numpy(labels)
    noise = torch.randn(x0.shape, generator=torch.Generator().manual_seed(7))
    model = done["raw_model"]

    def error_at(t):
        losses = done["process"].losses(model, x0, torch.full((256,), t), noise, {"y": y})
        return losses["loss"].mean()

    with torch.no_grad(), done["autocast"], done["ema"].applied(model):
        assert error_at(1.0) < 1.15 * error_at(0.95)
