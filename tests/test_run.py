"""A run's start and logs: the cut of a batch, the largest batch that fits, sums by quarter of t, where to resume."""

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from conftest import refused, script_settings
from tiny_runs import logged

from configurator import Config
from nanodiff.conditions import Conditioned
from nanodiff.training.batch import largest_batch
from nanodiff.training.log import Meter, RunLog, open_wandb
from nanodiff.training.settings import FREE, RATES, check_settings

NO_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory"),
    MemoryError(),
]


class Memory:
    """A stand-in for model, process and optimizer: a device with room for `room` images at a time."""

    config = Conditioned()
    is_gaussian = False
    shift = staticmethod(lambda t: t)

    def __init__(self, room, error=NO_MEMORY[0]):
        self.room = room
        self.error = error
        self.tried = []
        self.cleared = 0
        self.w = torch.zeros((), requires_grad=True)
        self.parameters = lambda: iter([self.w])

    def losses(self, model, x0, t, noise, cond):
        self.tried.append(len(x0))
        if len(x0) > self.room:
            raise self.error
        return {"loss": self.w * x0.flatten(1).sum(1)}

    def zero_grad(self):
        self.cleared += 1


def find(memory, limit):
    sizes = [n for n in range(1, limit + 1) if limit % n == 0]
    return largest_batch(memory, memory, (1, 2, 2), nullcontext(), sizes)


@pytest.mark.parametrize("error", NO_MEMORY, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize(
    "limit, room, best",
    [
        (48, 1000, 48),
        (63, 30, 21),
        (7, 5, 1),
    ],
)
def test_the_largest_batch_that_fits(error, limit, room, best):
    memory = Memory(room, error)
    assert find(memory, limit) == best
    assert memory.cleared == len(memory.tried)  # after each try, the failed one as well


def test_no_batch_fits_or_something_else_is_wrong():
    refused("not even one image", find, Memory(0), 8)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        find(Memory(0, RuntimeError("mat1 and mat2 shapes cannot be multiplied")), 8)


def test_ranks_agree_on_the_largest_batch(monkeypatch):
    """8 fit on this rank; the other, whose answer stands in for the collective, has room for 2."""

    def all_reduce(x, op):
        if op == dist.ReduceOp.MIN:
            x.clamp_(max=2)

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    assert find(Memory(8), 16) == 2


def new_meter(costs=()):
    process = SimpleNamespace(is_gaussian=False, t_max=1)
    loop_state = {"train_time_s": 0.0, "log_lines": 0, "running_loss": 0.0}
    return Meter(process, torch.device("cpu"), torch.float32, costs, loop_state)


def test_means_since_the_last_log_line():
    """Means are weighted, over all images of all steps; the timestep sampler gets the present step, unweighted."""
    meter = new_meter()

    def step(*micro_batches):
        meter.start_step(passes=2)
        for t, weight, loss in micro_batches:
            terms = {"loss": torch.tensor(loss), "vb": 3 * torch.tensor(loss)}
            meter.add(torch.tensor(t), torch.tensor(weight), terms, 0.0)
        return meter.losses()

    t, losses = step(([0.1, 0.2], [1.0, 3.0], [1.0, 2.0]))
    assert losses.tolist() == [[1, 2]]
    assert t.shape == (1, 2)
    saved = meter.state_dict()[0]["sums"]["loss"]  # a thread writes it during the next step
    _, losses = step(([0.6], [1.0], [2.0]), ([1.0], [0.5], [4.0]))
    assert losses.tolist() == [[2], [4]]
    assert saved.tolist() == [[7, 0, 0, 0], [4, 0, 0, 0]]
    found = meter.mean_losses()
    assert found.pop("train/loss_q1") != found.get("train/loss_q1")  # NaN: no image
    expected = {
        "train/loss": 11 / 4,
        "train/loss_q0": 7 / 4,
        "train/loss_q2": 2.0,
        "train/loss_q3": 4.0,
    }
    assert {key: x for key, x in found.items() if "loss" in key} == expected
    assert found["train/vb"] == 3 * found["train/loss"]
    assert found["train/vb_q3"] == 12
    meter.restart()
    step(([0.6], [1.0], [3.0]))
    assert meter.mean_losses()["train/loss"] == 3  # it starts anew


@pytest.fixture
def clock(monkeypatch):
    """[seconds] that perf_counter reads."""
    clock = [100.0]
    monkeypatch.setattr("nanodiff.training.log.time.perf_counter", lambda: clock[0])
    return clock


def take_step(meter, clock, seconds, data_seconds=0.0, log_now=False, loss=1.0, passes=1):
    """A step of 8 images on the clock."""
    meter.start_step(passes)
    for _ in range(passes):
        clock[0] += seconds / passes
        t = torch.full((1,), 0.5)
        terms = {"loss": torch.full((1,), loss)}
        meter.add(t, torch.ones(1), terms, data_seconds)
    meter.losses()
    meter.end_step(torch.Size([8, 3, 16, 16]), log_now)


def test_times_leave_out_the_first_step(monkeypatch, clock):
    """Steps of 0.1 s, 0.01 s of it for data, after a first one of 9 s."""
    monkeypatch.setattr("nanodiff.device.measured_peak", lambda device, dtype: 1e9)
    meter = new_meter()
    take_step(meter, clock, 9.0, 8.0)
    for i in range(10):
        take_step(meter, clock, 0.1, 0.01, log_now=i == 9)
    line = meter.line(11, total_batch_size=8, flops_per_image=1e6)
    assert line["train/dt_ms"] == pytest.approx(100)
    assert line["train/data_ms"] == pytest.approx(10)
    assert line["train/images_per_sec"] == pytest.approx(80)
    assert line["train/mfu"] == pytest.approx(8)
    assert line["total_training_time_s"] == pytest.approx(10)


@pytest.mark.parametrize(
    "every, count",
    [
        (-1, 0),
        (0, 1),
        (100, 6),
        (250, 3),
        (1000, 1),
    ],
)
def test_what_is_left_counts_the_evaluations_still_to_come(every, count):
    """An evaluation passes 2,400 images forward, a third of the work of training on them; the line's own is to come."""
    meter = new_meter([(every, 2400)])
    line = {"step": 100, "images_seen": 800, "train/images_per_sec": 80.0, "total_training_time_s": 0.0}
    line |= {f"train/{key}": 0.0 for key in ("loss_smooth", "grad_norm", "lrm", "dt_ms", "mfu")}
    left = (500 * 8 + count * 800) / 80 / 60
    assert meter.console(line, num_iterations=600).endswith(f"0.0 min, {left:.1f} left")
    final = (every >= 0) * 800 / 80 / 60
    assert meter.console(line | {"step": 600}, num_iterations=600).endswith(f" {final:.1f} left")


def test_the_printed_loss_is_smoothed_and_debiased_as_nanochats(monkeypatch, clock):
    """Each line's mean stays in the log; the running one knows no start at 0, skips NaN, and outlives a resume."""
    monkeypatch.setattr("nanodiff.device.measured_peak", lambda device, dtype: 1e12)
    meter = new_meter()
    running = 0.0
    for n, loss in enumerate((4.0, 2.0, 3.0), 1):
        take_step(meter, clock, 0.1, log_now=True, loss=loss)
        line = meter.line(n, 8, 1e6) | {"train/grad_norm": 1.0, "train/lrm": 1.0}
        running = 0.9 * running + 0.1 * loss
        assert line["train/loss"] == loss
        assert line["train/loss_smooth"] == pytest.approx(running / (1 - 0.9**n))
        assert f"| loss {line['train/loss_smooth']:.4f} |" in meter.console(line, 9)
    resumed = new_meter()
    resumed.loop_state |= json.loads(json.dumps(meter.loop_state))
    for again in (meter, resumed):
        take_step(again, clock, 0.1, log_now=True, loss=float("nan"))
        assert again.line(4, 8, 1e6)["train/loss_smooth"] == line["train/loss_smooth"]


def test_a_peak_below_what_training_reaches_is_measured_again(monkeypatch, clock):
    """The machine may be busy while it is measured; and a share of less than what was reached is no share."""
    peaks = iter([1e7, 1e6, 2e7, *[1e9] * 3])
    monkeypatch.setattr("nanodiff.device.measured_peak", lambda device, dtype: next(peaks))
    meter = new_meter()
    mfu = []
    for step in range(1, 5):
        take_step(meter, clock, 0.1 if step < 4 else 0.01, log_now=True)
        mfu.append(meter.line(step, total_batch_size=8, flops_per_image=2e5)["train/mfu"])
    assert mfu == pytest.approx([80, 80, 80, 16])


def test_the_first_step_shows_its_passes(clock, capsys):
    """After 5 s, then every 30 s, if nobody sits at a terminal; later steps have their log lines."""
    meter = new_meter()
    take_step(meter, clock, 80.0, passes=40)
    lines = capsys.readouterr().err.splitlines()
    starts = [line.split(" passes")[0] for line in lines]
    assert starts == ["first step 3/40", "first step 19/40", "first step 35/40"]
    assert lines[0].endswith("| 0.5/s | eta 74 s")
    take_step(meter, clock, 80.0, passes=40)
    assert not capsys.readouterr().err


def test_a_figure_that_is_not_finite_ends_the_run(tmp_path):
    """It would vanish from the line and from the log. A quarter of t without images is no fault."""
    config = Config(resume="auto")
    config.defaults = {}
    described = {"config": config, "num_iterations": 9}
    log = RunLog("dummy", tmp_path, torch.device("cpu"), described, 0, loop_state={})
    for key in ("val/loss", "val/loss_ema", "val/fd_classifier"):
        with pytest.raises(FloatingPointError, match=f"step 30: {key} is nan; give .*\\(saved: none\\)"):
            log.evaluation(30, {"val/loss_q0": 0.5, key: float("nan")})
    line = log.evaluation(30, {"val/loss_q0": float("nan"), "val/loss": 0.5})
    assert line == "step 30 | val/loss_q0 nan | val/loss 0.5000"


@pytest.mark.parametrize("fault", ["no API key", "no such host"])
def test_wandb_without_a_login_or_a_network_is_one_line(monkeypatch, tmp_path, capsys, fault):
    """And the wait is announced, as wandb is silent meanwhile."""
    wandb = pytest.importorskip("wandb")

    def init(**options):
        sys.excepthook = lambda *error: None  # as wandb does
        raise wandb.errors.CommError(fault)

    monkeypatch.setattr(wandb, "init", init)
    hook = sys.excepthook
    config = Config(resume="auto")
    config.defaults = {}
    described = {"config": config, "num_iterations": 9}
    open_log = lambda: RunLog("name", tmp_path, torch.device("cpu"), described, 0, {"wandb_id": None})
    refused(f"run='name' logs to wandb: {fault}; accepted: .*`wandb login`, .*--run=dummy", open_log)
    assert capsys.readouterr().out == "waiting for wandb, up to two minutes\n"
    assert sys.excepthook is hook  # wandb's own would print a traceback above the line


def test_without_wandb_a_line_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", None)
    refused("wandb: .*; accepted: `pip install wandb`", open_wandb, "name", tmp_path, {}, None)


@pytest.mark.parametrize(
    "later, kept",
    [
        (4, None),
        (2, "old"),
    ],
)
def test_another_branch_is_another_run_of_wandb(monkeypatch, tmp_path, later, kept):
    """wandb drops lines whose step is not above its last."""
    wandb = pytest.importorskip("wandb")
    init = Mock()
    monkeypatch.setattr(wandb, "init", init)
    config = Config(resume="2")
    config.defaults = {"resume": "auto"}
    described = {"config": config, "num_iterations": 9}
    run_dir = tmp_path / "a"
    (run_dir / "checkpoints" / f"step_00000{later}").mkdir(parents=True)
    RunLog("name", run_dir, torch.device("cpu"), described, 2, {"wandb_id": "old"})
    assert init.call_args.kwargs["id"] == kept


def test_a_log_begins_where_the_run_resumes(tmp_path):
    """What was recorded stays; what is changed is appended with its step."""

    def open_log(lr, step, num_iterations=9):
        defaults = {"lr": 1, "rank": 3, "resume": "auto", "checkpoints_kept": 2}
        config = Config(defaults | {"lr": lr})
        config.defaults = defaults
        described = {"config": config, "num_iterations": num_iterations}
        return RunLog("dummy", tmp_path, torch.device("cpu"), described, step, loop_state={})

    recorded = lambda: json.loads((tmp_path / "config.json").read_text())
    log = open_log(lr=2, step=0, num_iterations=3)
    for step in (1, 2, 3):
        line = {"step": step, "train/loss": torch.tensor(0.5), "train/grad_norm": float("inf")}
        log.metrics(line)
    log = open_log(lr=2, step=2, num_iterations=3)
    log.metrics({"step": 3, "train/loss": 1.0, "val/loss_q0": float("nan")})
    assert logged(tmp_path) == [  # JSON has no infinity
        {"step": 1, "train/loss": 0.5},
        {"step": 2, "train/loss": 0.5},
        {"step": 3, "train/loss": 1.0},
    ]
    first = recorded()
    assert first["changed_from"] == {"lr": 1}
    for lr, num_changes in (
        (5, 1),
        (5, 1),
        (2, 2),
    ):
        open_log(lr, step=2)
        assert len(recorded()["changes"]) == num_changes
        change = recorded()["changes"][-1]
        assert change["step"] == 2
        assert change["config"]["lr"] == lr
        assert change["num_iterations"] == 9
        assert change["environment"]["command"] == sys.argv
        assert recorded() | {"changes": None} == first | {"changes": None}


def test_a_resume_says_nothing_of_what_is_yet_to_be_derived(capsys):
    """Nor of what an older run did not record."""
    config = {
        "dtype": "auto",
        "device_batch_size": 16,
        "num_iterations": -1,
        "objective": "flow",
    }
    meta = {"step": 2, "config": config}
    checkpoint = Path("runs/a/checkpoints/step_000002")
    args = ("--dtype=float32", "--num_iterations=9")
    check_settings(checkpoint, meta, script_settings("base_train", *args))
    check_settings(checkpoint, meta, script_settings("base_train", *args, "--device_batch_size=8"))
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"resumed from {checkpoint}"
    assert second == f"{first}, now with device_batch_size=8 (was 16)"


def test_the_tables_of_a_resume_name_settings():
    assert not FREE & RATES
    assert script_settings("base_train").keys() >= FREE | RATES
