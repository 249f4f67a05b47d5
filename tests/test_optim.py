"""Laws of the optimizer: torch's AdamW, the polar factor by SVD, and that ranks and resuming change nothing."""

import copy
import functools
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from conftest import refused
from figures import build
from processes import run_process
from tiny_runs import assert_identical, make_optimizer
from torch.testing import assert_close

from nanodiff.training import optim, shard
from nanodiff.training.ema import EMA
from nanodiff.training.optim import POLAR_EXPRESS, LossScaler, normalised, polar_express


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.fc1 = nn.Linear(16, 40, bias=False)
        self.fc2 = nn.Linear(40, 16)
        self.ada = nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return x + self.fc2(torch.tanh(self.fc1(q + torch.tanh(k) * v))) + self.ada(x)


class Toy(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        self.patch_embed = nn.Linear(6, 16)
        self.y_embed = nn.Embedding(5, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.gain = nn.Parameter(torch.ones(()))
        self.final = nn.Linear(16, 5)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        generator = torch.Generator().manual_seed(seed)
        for p in self.parameters():
            nn.init.normal_(p, std=0.3, generator=generator)

    def parts(self):
        return [*self.blocks, self.final]

    def forward(self, x, y):
        h = self.patch_embed(x) + self.y_embed(y)
        for block in self.blocks:
            h = block(h)
        return (self.final(self.gain * h) ** 2).mean()


def batch(step, n=64):
    """More rows than columns, else Muon enlarges the rounding errors in gradients' null spaces up to 966-fold."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(n, 6, generator=generator), torch.randint(5, (n,), generator=generator)


def train(model, optimizer, steps, rows=slice(None), clip=0.0, ema=None):
    """A few steps as the trainer makes them; the gradient norms."""
    norms = []
    for step in steps:
        x, y = batch(step)
        model(x[rows], y[rows]).backward()
        norm = optimizer.sync_grads(0)
        optimizer.step((clip / norm).clamp(max=1.0) if clip else 1.0)
        norms.append(optimizer.read_norm()[0])
        if ema:
            ema.update(step + 1)
        optimizer.zero_grad()
    optimizer.wait_weights()
    return torch.tensor(norms)


def params(model):
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def randomize_grads(*models, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for p, *others in zip(*(model.parameters() for model in models)):
        p.grad = torch.randn(p.shape, generator=generator)
        for other in others:
            other.grad = p.grad.clone()


def largest_difference(a, b):
    assert a.keys() == b.keys()
    return max(float(torch.as_tensor(a[name] - b[name]).abs().max()) for name in a)


def test_adamw_is_torchs_adamw():
    model = Toy()
    theirs = copy.deepcopy(model)
    ours = make_optimizer(model, "adamw", lr=3e-3, weight_decay=0.1, beta2=0.95)
    trainable = [p for p in theirs.parameters() if p.requires_grad]
    matrices = [p for p in trainable if p.ndim >= 2]
    others = [p for p in trainable if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95))
    for step in range(20):
        randomize_grads(model, theirs, seed=step)
        theirs.final.bias.grad.zero_()
        model.final.bias.grad = None  # a missing gradient is zero
        for group in (*ours.param_groups, *reference.param_groups):
            group["lr"] = 3e-3 * (1 - step / 30)
        norm = float(ours.sync_grads(0))
        for name in params(model):
            assert model.get_parameter(name).grad is None  # each is freed once it is sent
        want = torch.nn.utils.clip_grad_norm_(trainable, 2.0)
        assert norm == pytest.approx(float(want), rel=1e-5)
        ours.step(min(2.0 / norm, 1.0))
        reference.step()
    assert largest_difference(params(model), params(theirs)) < 1e-6


def with_spectrum(rows, cols, values, seed=0):
    rng = np.random.default_rng(seed)
    U = np.linalg.qr(rng.standard_normal((rows, len(values))))[0]
    V = np.linalg.qr(rng.standard_normal((cols, len(values))))[0]
    return U, V, torch.tensor(U * values @ V.T, dtype=torch.float32)


class NotFiniteOnMPS:
    device = torch.device("mps")

    def __bool__(self):
        return False


def test_a_step_that_is_not_finite_changes_nothing_on_mps():
    """Whose fused kernel ignores found_inf."""
    weights, *state = torch.ones(4, 3)
    optim.AdamW(0.95).update({"lr": 0.1, "weight_decay": 0.1}, 3, NotFiniteOnMPS(), weights, *state)
    assert (weights == 1).all()


@pytest.mark.parametrize(
    "rows,cols",
    [
        (48, 48),
        (32, 100),
        (100, 32),
        (1, 7),
        (7, 1),
    ],
)
def test_polar_express_maps_singular_values_by_the_polynomial(rows, cols):
    s = np.logspace(0, -2, min(rows, cols))
    U, V, G = with_spectrum(rows, cols, s)
    f = s / np.linalg.norm(s) / 1.01  # scalar Polar Express in float64
    for a, b, c in POLAR_EXPRESS:
        f = (a * f + b * f**3 / 1.01**2 + c * f**5 / 1.01**4) / 1.01
    assert f.min() > 0.98  # near-orthogonal: two decades of singular values within 2% of 1
    assert f.max() < 1.01
    gradients = torch.stack([G, 1e-6 * G, 0 * G, -G])
    got = polar_express(normalised(gradients, torch.float32))
    factor = torch.tensor(U * f @ V.T, dtype=torch.float32)
    want = torch.stack([factor, factor, 0 * factor, -factor])
    assert_close(got, want, atol=2e-4, rtol=0)


@pytest.mark.parametrize(
    "rows,cols",
    [
        (64, 192),
        (192, 64),
    ],
)
def test_polar_express_in_bf16_amplifies_nothing(rows, cols):
    """Rounding must not push a singular value past the polynomials' range, from where they diverge. Twenty draws."""
    s = np.logspace(0, -2, 64)
    gradients = [with_spectrum(rows, cols, s, seed)[2] for seed in range(20)]
    got = polar_express(normalised(torch.stack(gradients), torch.bfloat16))
    assert torch.linalg.matrix_norm(got.float(), ord=2).max() < 1.02


class Matrices(nn.Module):
    """Blocks with a weight of each kind that Muon meets, all oblong: Gaussian gradients are then well-conditioned."""

    def __init__(self):
        super().__init__()
        blocks = [
            nn.Linear(64, 24),
            nn.Linear(24, 64),
            nn.Linear(64, 24),
            nn.Conv2d(8, 16, 3),
            nn.Conv1d(40, 20, 1),
        ]
        self.blocks = nn.ModuleList(blocks)


def test_muon_is_momentum_nesterov_and_the_polar_factor():
    model = Matrices()
    lr = 0.1
    wd = 0.2
    opt = make_optimizer(model, muon_lr=lr, weight_decay=wd)
    weights = {name: p for name, p in model.named_parameters() if p.ndim > 1}
    momentum = dict.fromkeys(weights, 0.0)
    for step in range(3):
        before = params(model)
        randomize_grads(model, seed=step)
        grads = {name: p.grad.double().flatten(1).numpy() for name, p in weights.items()}
        opt.sync_grads(0)
        opt.step()
        for name, g in grads.items():
            mu = 0.85 + 0.1 * step / 300
            momentum[name] = mu * momentum[name] + (1 - mu) * g
            nesterov = mu * momentum[name] + (1 - mu) * g
            U, _, Vh = np.linalg.svd(nesterov, full_matrices=False)
            scale = lr * max(1, g.shape[0] / g.shape[1]) ** 0.5
            change = (1 - lr * wd) * before[name] - weights[name].detach()
            update = change.double().numpy().reshape(g.shape) / scale
            error = np.linalg.norm(update - U @ Vh, ord=2)  # spectral: how far singular values are from 1
            assert error < 0.16, (name, error)


def test_compiling_changes_nothing_and_happens_once(monkeypatch):
    """Rates and scales that change with every step lead to no second graph."""
    graphs = []
    eager = Matrices()
    compiled = Matrices()
    compiled.load_state_dict(eager.state_dict())
    backend = lambda graph, _: graphs.append(graph) or graph.forward
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 100)
    monkeypatch.setattr(optim, "pays_to_compile", lambda device: True)  # on a CPU, too
    for model in (eager, compiled):
        opt = make_optimizer(model, weight_decay=0.1, compile=model is compiled)
        for step in range(3):
            randomize_grads(model, seed=step)
            opt.param_groups[-1]["lr"] = 0.1 / (step + 1)
            opt.sync_grads(0)
            opt.step(grad_scale=0.5 + step)
        if model is eager:
            assert not graphs
    assert len(graphs) == 2 * len(opt.buffers[-1].batches)
    for name, p in eager.state_dict().items():
        assert_close(p, compiled.state_dict()[name], atol=1e-5, rtol=0)  # fp32 factors, not doubles


@pytest.mark.parametrize("make", [Toy, lambda: build("modern"), lambda: build("unet")])
@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_every_trainable_parameter_is_in_exactly_one_group(make, optimizer):
    model = make()
    opt = make_optimizer(model, optimizer, lr=1e-3, muon_lr=0.02, weight_decay=0.1)
    names = [name for group in opt.param_groups for name in group["params"]]
    assert sorted(names) == sorted(name for name, p in model.named_parameters() if p.requires_grad)
    muon = []
    for group in opt.param_groups:
        rate = {"muon": 0.02, "adamw": 1e-3}[group["kind"]]
        assert group["lr"] == rate
        assert group["initial_lr"] == rate
        for p in group["params"].values():
            assert (p.ndim >= 2) == (group["weight_decay"] > 0)
        if group["kind"] == "muon":
            muon += group["params"]
    for name, p in model.named_parameters():
        in_block = name.startswith(("blocks.", "input_blocks.", "middle_block.", "output_blocks."))
        others = name.startswith("input_blocks.0.") or ".ada." in name
        is_matrix = p.ndim >= 2 and in_block and not others
        assert (name in muon) == (optimizer == "muon" and is_matrix), name


def test_a_weight_that_no_rule_knows_is_named():
    """Else Muon would leave a new backbone's matrices to AdamW, without a word."""
    model = Toy()
    model.trunk = nn.Linear(4, 4)
    refused(r"muon: trunk\.weight is in neither", make_optimizer, model)


@pytest.mark.parametrize(
    "bad",
    [
        float("nan"),
        float("inf"),
        1e30,  # whose square is infinite
    ],
)
def test_a_norm_that_is_not_finite_changes_neither_weights_nor_state(bad):
    model = Toy()
    opt = make_optimizer(model, weight_decay=0.1)
    train(model, opt, range(2))
    before = params(model)
    state = opt.state_dict()
    randomize_grads(model)
    model.blocks[1].fc1.weight.grad[0] = bad
    opt.step((1 / opt.sync_grads(0)).clamp(max=1.0))
    assert largest_difference(params(model), before) == 0
    assert not np.isfinite(opt.read_norm()[0])
    assert_identical(opt.state_dict(), state)
    if bad == 1e30:
        assert opt.not_finite() == "gradients finite, their norm is not"
    else:
        assert opt.not_finite() == "3% of blocks.1.fc1.weight"


CASES = [("muon", 0.05), ("adamw", 0.0)]  # clipped and not
OPTIONS = {"lr": 1e-2, "muon_lr": 0.02, "weight_decay": 0.1}


def two_ranks(folder):
    """What each of two ranks finds, with its half of every batch and, before the optimizer, weights of its own."""
    shard.LEAST_PART = 1000
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    rows = slice(32 * rank, 32 * rank + 32)
    found = {}
    for case in CASES:
        model = Toy(seed=rank)
        opt = make_optimizer(model, case[0], **OPTIONS)
        ema = EMA(model, opt, "0.9")
        norms = train(model, opt, range(4), rows, case[1], ema)
        found[case] = {
            "norms": norms,
            "params": params(model),
            "state": opt.state_dict(),
            "average": ema.state_dict(),
        }
        with ema.applied(model):
            found[case]["applied"] = params(model)

    exchanges = (
        ("after", False, torch.float32),
        ("during", True, torch.float32),
        ("bf16", True, torch.bfloat16),
    )
    for name, overlap, grad_dtype in exchanges:
        model = Toy()
        opt = make_optimizer(model, **OPTIONS, grad_dtype=grad_dtype)
        x, y = batch(0)
        for micro_step in range(2):
            opt.last_micro_step = overlap and micro_step == 1
            model(x[rows], y[rows]).backward()
        sent = len(opt.buffers) - len(opt.unsent)
        norm = float(opt.sync_grads(0))
        opt.step()
        found[name] = {
            "sent": sent,
            "buffers": len(opt.buffers),
            "norm": norm,
            "gathering": [],
        }

        def note_gathering(*_, opt=opt, to=found[name]["gathering"]):
            to.append([name for buffer in opt.buffers if buffer.work for name in buffer.names])

        note_gathering()
        model.blocks[0].register_forward_pre_hook(note_gathering)
        model(x, y)
        note_gathering()
        found[name]["params"] = params(model)
    torch.save(found, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    run_process(two_ranks, folder, ranks=2)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_equal_one(ranks, case):
    """Norms, weights, averages and state. What resumes from it: tests/test_faults.py."""
    model = Toy(seed=0)
    opt = make_optimizer(model, case[0], **OPTIONS)
    ema = EMA(model, opt, "0.9")
    norms = train(model, opt, range(4), clip=case[1], ema=ema)
    first = ranks[0][case]
    second = ranks[1][case]
    assert largest_difference(first["average"]["ema_0.9"], ema.state_dict()["ema_0.9"]) < 1e-5
    assert second["state"] == {"step": 4}
    assert largest_difference(first["state"], opt.state_dict()) < 1e-5
    for found in (first, second):
        assert_close(found["norms"], norms, rtol=1e-5, atol=0)
        assert largest_difference(found["params"], params(model)) < 1e-5
        with ema.applied(model):  # each rank averaged its share
            assert largest_difference(found["applied"], params(model)) < 1e-5
    assert largest_difference(first["params"], second["params"]) == 0


def test_the_exchange_during_backward_changes_no_bit(ranks):
    for found in ranks:
        after = found["after"]
        during = found["during"]
        assert after["sent"] == 0
        assert during["sent"] == during["buffers"]
        assert during["buffers"] > 3  # 3 groups: Muon's is cut
        assert after["norm"] == during["norm"]
        first, at_block_0, last = during["gathering"]  # the weights, until a block reads them
        assert len(first) > len(at_block_0) > 0
        assert not last
        for name in at_block_0:
            assert name.startswith(("blocks.1", "blocks.2", "final"))
        assert largest_difference(after["params"], during["params"]) == 0
    # sent in bf16, gradients are good to 8 bits, and both ranks stay alike
    exact = ranks[0]["during"]
    rounded = ranks[0]["bf16"]
    assert 0 < abs(rounded["norm"] - exact["norm"]) < 2**-8 * exact["norm"]
    assert largest_difference(rounded["params"], ranks[1]["bf16"]["params"]) == 0


def test_the_walk_is_the_published_one():
    """log2 of the scale: 20 at first, +0.001 per good step, -1 per overflow (IDDPM's fp16 trainer); the end is at 0."""
    scaler = LossScaler(enabled=True)
    off = LossScaler(enabled=False)
    for overflow in (*[False] * 1000, True, True, False, True):
        scaler.update(overflow)
        off.update(overflow)
    assert scaler.lg_loss_scale == pytest.approx(21.0 - 3 + 0.001)
    assert scaler.inv_scale < 1.0
    assert off.inv_scale == 1.0
    while scaler.can_skip:
        scaler.update(overflow=True)
    assert 0 <= scaler.lg_loss_scale < 1
    assert not off.can_skip
