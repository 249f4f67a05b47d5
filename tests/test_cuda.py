"""On a GPU as on a CPU, where each test runs, too: the same numbers, one wait a step, nothing compiled twice."""

import functools
import threading
import warnings

import pytest
import tiny_runs
import torch
import torch.distributed as dist
from processes import run_process
from test_checkpoint import META
from tiny_runs import assert_resumes, losses, make_data, make_optimizer, randomise
from torch.utils._python_dispatch import TorchDispatchMode

from nanodiff.common import draw_rows
from nanodiff.device import autocast_to, host_copy, init_device
from nanodiff.diffusion.flow import FlowMatching
from nanodiff.dist import gather_objects, join_ranks, leave_together, over_ranks, stop_signal
from nanodiff.models.build import build_model
from nanodiff.models.dit import DiTConfig
from nanodiff.safetensors import load_safetensors
from nanodiff.training import batch, checkpoint

CPU = torch.device("cpu")
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
CUDA = pytest.param("cuda", marks=[pytest.mark.cuda, NO_GPU])
TINY = "--data=tiny --depth=1 --patch_size=4 --total_batch_size=16 --num_iterations=6 --log_every=1 --eval_every=3"
TINY = [*TINY.split(), "--eval_images=20", "--sample_every=3", "--sample_steps=2"]


@pytest.fixture(params=["cpu", CUDA])
def device(request):
    return init_device(request.param)


def build(device, block="modern"):
    """A small DiT whose every weight counts: at its initial ones, adaLN-Zero hides most gradients."""
    shape = dict(
        image_size=16,
        in_channels=3,
        out_channels=3,
        num_classes=8,
        patch_size=2,
        block=block,
    )
    model = build_model(DiTConfig.from_depth(2, **shape), device, seed=0)
    model.load_state_dict(randomise(model.state_dict()))
    return model


def loss_and_gradient(raw_model, model, device, dtype):
    """Of flow matching on 16 images; the gradient of all parameters as one fp32 vector on the CPU."""
    rows = torch.empty(16, 2, 3, 16, 16, device=device)
    x0, noise = draw_rows((0, 1), 0, "cpu", rows).unbind(1)
    t = torch.linspace(0.02, 0.98, 16, device=device)
    y = torch.arange(16, device=device) % 9
    with autocast_to(device, dtype):
        loss = FlowMatching().losses(model, x0, t, noise, {"y": y})["loss"].mean()
    loss.backward()
    gradients = [p.grad.flatten().float().cpu() for p in raw_model.parameters()]
    return float(loss.detach()), torch.cat(gradients)


def flat_weights(model):
    return torch.cat([p.detach().flatten().cpu() for p in model.parameters()])


@pytest.mark.parametrize("block", ["modern", "classic"])
@pytest.mark.parametrize(
    "dtype, tolerance",
    [
        (torch.float32, 5e-3),  # TF32 on GPUs
        (torch.bfloat16, 3e-2),
    ],
)
@pytest.mark.parametrize("is_compiled", [False, True])
def test_loss_and_gradients_are_those_of_fp32_on_a_cpu(device, block, dtype, tolerance, is_compiled):
    reference = build(CPU, block)
    raw_model = build(device, block)
    is_compiled &= device.type == "cuda"  # on a CPU this takes a minute, and is tested elsewhere
    model = torch.compile(raw_model, dynamic=False) if is_compiled else raw_model
    want_loss, want = loss_and_gradient(reference, reference, CPU, torch.float32)
    loss, gradient = loss_and_gradient(raw_model, model, device, dtype)
    assert loss == pytest.approx(want_loss, rel=tolerance)
    assert float((gradient - want).norm() / want.norm()) < tolerance


@pytest.mark.parametrize(
    "dtype, tolerance",
    [
        (torch.float32, 1e-2),
        (torch.bfloat16, 5e-2),
    ],
)
@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_step_of_the_optimizer_is_that_of_fp32_on_a_cpu(device, dtype, tolerance, is_compiled):
    updates = []
    for where, muon_dtype in (
        (CPU, torch.float32),
        (device, dtype),
    ):
        model = build(where)
        optim = make_optimizer(model, compile=is_compiled, dtype=muon_dtype)  # on a CPU this compiles nothing
        before = flat_weights(model)
        for i, p in enumerate(model.parameters()):
            (p.grad,) = draw_rows((1, i), 0, "cpu", p.detach()[None].to(where))
        norm = float(optim.sync_grads(0))
        optim.step(0.5)
        updates.append((norm, flat_weights(model) - before))
    (want_norm, want), (norm, update) = updates
    assert norm == pytest.approx(want_norm, rel=1e-4)
    assert float((update - want).norm() / want.norm()) < tolerance


class Reads(TorchDispatchMode):
    """Counts the numbers that the host reads from tensors: on a GPU it waits for each."""

    count = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.count += op in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        return op(*args, **kwargs or {})


def test_a_steady_step_waits_for_nothing_but_its_norm(device, base, run_script):
    """And that has the update queued behind it, so that the GPU never waits for the host."""
    make_data()
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("warn")
    found = []
    never = [f"--{what}_every=-1" for what in ("eval", "sample", "save")]
    for steps in (3, 5):
        args = (*never, "--log_every=9", "--compile=False", f"--num_iterations={steps}", f"--model_tag={steps}")
        with warnings.catch_warnings(record=True) as caught, Reads() as reads:
            warnings.simplefilter("always")
            run_script("base_train", *TINY, *args, f"--device_type={device.type}")
        waits = sum("synchronizing" in str(w.message) for w in caught)
        found.append((reads.count, waits))
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("default")
    assert found[0] == found[1]


def test_training_goes_on_while_a_thread_writes(device, tmp_path, monkeypatch):
    """The file holds the weights of the save's own step; the next save waits for this one."""
    may_write = threading.Event()
    save = checkpoint.save_safetensors
    monkeypatch.setattr(checkpoint, "save_safetensors", lambda *args: may_write.wait(60) and save(*args))
    weights = {"w": torch.ones(10**6, device=device)}
    saver = checkpoint.Saver()
    saver.start(tmp_path, 1, {"model": host_copy(weights)}, META)
    weights["w"] += 1
    saver.check()
    assert checkpoint.list_checkpoints(tmp_path) == []
    threading.Timer(0.1, may_write.set).start()
    saver.wait()
    saver.start(tmp_path, 2, {"model": host_copy(weights)}, META)
    assert checkpoint.list_checkpoints(tmp_path)[0][0] == 1
    saver.wait()
    for step in (1, 2):
        path = checkpoint.find_checkpoint(tmp_path, step)
        tensors, _ = load_safetensors(path / "model.safetensors")
        assert (tensors["w"] == step).all()


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")
def test_two_gpus_train_the_same_model_as_one(base):
    make_data(train=72)
    args = [*TINY, "--dtype=bfloat16", "--eval_every=-1", "--sample_every=-1"]
    for ranks in (0, 2):
        run_process("base_train", *args, f"--model_tag={ranks}", ranks=ranks)
    assert losses(base, "0") == pytest.approx(losses(base, "2"), rel=1e-2)  # gradients exchanged in bf16


def call_every_collective(device):
    """Every collective that the project calls, in the process group that a run has."""
    join_ranks(device, 60)
    flat = torch.arange(64.0, device=device)
    share = torch.empty_like(flat)
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    reduce_scatter(share, flat, async_op=True).wait()
    all_gather(flat, flat[:64], async_op=True).wait()  # in place, as the optimizer does
    dist.broadcast(flat, 0)
    dist.all_reduce(flat)
    least = torch.tensor(3, device=device)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    gathered = [torch.empty_like(flat)]
    dist.all_gather(gathered, flat)
    dist.all_gather_object([None], (0.5, "name"))
    dist.broadcast_object_list([1], src=0)
    assert torch.equal(share, flat)
    assert torch.equal(gathered[0].cpu(), torch.arange(64.0))
    assert int(least) == 3
    sums = over_ranks(torch.ones(2, dtype=torch.float64))
    assert sums.dtype == torch.float64
    assert sums.tolist() == [1, 1]
    assert gather_objects({0: 1}) == [{0: 1}]
    assert stop_signal.agree() == 0
    leave_together()


@pytest.mark.slow
def test_every_collective_on_one_rank(device):
    run_process(call_every_collective, device, ranks=1)


@pytest.mark.slow
def test_a_deterministic_run_resumes_bit_for_bit(device, base):
    """In a process of its own: cuBLAS reads its setting once."""
    make_data(train=72)
    args = [*TINY, "--deterministic", f"--device_type={device.type}", f"--compile={device.type == 'cuda'}"]
    run_process(assert_resumes, base, tiny_runs.run_script, *args)


def test_nothing_is_compiled_twice(device, base, run_script, monkeypatch):
    """No graph breaks; and neither a second evaluation nor a second grid compiles anything."""
    make_data()
    if device.type == "cpu":
        monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    graphs = {}
    for steps in (3, 6):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        args = (f"--num_iterations={steps}", "--save_every=-1", f"--device_type={device.type}")
        run_script("base_train", *TINY, *args, f"--model_tag={steps}")
        assert not torch._dynamo.utils.counters["graph_break"]
        graphs[steps] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs[3] > 0
    assert graphs[6] == graphs[3]


def test_the_largest_batch_that_fits(device, monkeypatch):
    model = build(device)
    make_optimizer(model)
    limit = 8
    if device.type == "cuda":
        limit = 2**20
        memory = torch.cuda.get_device_properties(device).total_memory
        monkeypatch.setattr(batch, "MEMORY_TRIED", 2**31 / memory)
    autocast = autocast_to(device, torch.bfloat16)
    found = batch.automatic_batch(model, FlowMatching(), (3, 16, 16), autocast, limit)
    if device.type == "cuda":
        assert 8 <= found < limit
        assert limit % found == 0
        assert torch.cuda.memory_allocated() < 2**28
        torch.empty(2**32, dtype=torch.uint8, device=device)  # training has all of the memory
    else:
        assert found == limit
