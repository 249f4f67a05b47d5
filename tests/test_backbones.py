"""The laws that every backbone keeps: `model(x_t, t, **cond)` of a DiT with either block, and of a UNet."""

import copy
import ctypes
import functools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from figures import CONFIGS, filled, inputs
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor import config as inductor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from nanodiff.conditions import conditioning, made_from, some_conditions
from nanodiff.models.build import build_model, compile_model, compiled, estimate_flops, uncompiled
from nanodiff.models.checked import Checked
from nanodiff.models.dit import DiTConfig
from nanodiff.models.lora import add_lora
from nanodiff.models.unet import UNetConfig


@pytest.fixture(params=CONFIGS)
def config(request):
    return CONFIGS[request.param]


@pytest.fixture
def plain(config):
    """Few kinds of blocks: each is compiled."""
    if isinstance(config, UNetConfig):
        return replace(config, channel_mult=(1,), attention_resolutions=())
    return config


def build(config, **settings):
    if "vector_len" in settings and isinstance(config, UNetConfig):
        pytest.skip("a UNet takes one vector")
    return filled(replace(config, **settings))


def test_a_new_model_predicts_zero_and_every_parameter_comes_to_life(config):
    """After two steps of plain descent no parameter that is used has a zero gradient."""
    model = build_model(config, "cpu", 0)
    x, t, y = inputs()
    assert not model(x, t, y).any()
    for _ in range(3):
        model.zero_grad()
        (model(x, t, y) - x).square().mean().backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
    for name, p in model.named_parameters():
        assert p.grad.any(), name


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"low_res": 4},
        {"vector_dim": 7},
        {"vector_dim": 7, "vector_len": 5},
    ],
)
def test_flops_are_those_of_the_counter(config, more):
    model = build(config, **more)
    x, t, y = inputs(2)
    given = {"low_res": x[:, :, ::4, ::4]} if "low_res" in more else {}
    if "vector_len" in more:
        given["vectors"] = torch.ones(2, 5, 7)
    elif "vector_dim" in more:
        given["vectors"] = torch.ones(2, 7)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(x, t, y, **given)
    assert estimate_flops(model) == pytest.approx(3 * counter.get_total_flops() / 2, rel=1e-6)


def test_checkpointing_changes_no_gradient(config):
    """Recomputed blocks draw the same dropout, too."""
    dropout = {"dropout": 0.3} if isinstance(config, UNetConfig) else {}
    grads = []
    for checkpointing in (False, True):
        model = build(config, checkpointing=checkpointing, **dropout)
        torch.manual_seed(0)
        model(*inputs()).square().mean().backward()
        grads.append([p.grad for p in model.parameters()])
    for a, b in zip(*grads):
        assert torch.equal(a, b)


def test_a_deep_model_compiles_as_many_graphs_as_a_shallow_one(plain, monkeypatch):
    """Blocks of one shape share a graph, with adapters too; a UNet's levels repeat their blocks."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    found = []
    name, deep = ("num_res_blocks", 3) if isinstance(plain, UNetConfig) else ("depth", 9)
    for depth in (2, deep):  # torch by default allows eight graphs of one function
        model = build(plain, **{name: depth})
        add_lora(model, 2, 2.0, "qkv")
        compile_model(model, False)
        torch._dynamo.reset()
        counters.clear()
        for _ in range(2):
            model(*inputs()).square().mean().backward()
        with torch.no_grad():  # also for another size of batch
            model.eval()(*inputs(2))
        assert not counters["graph_break"]
        found.append(counters["stats"]["unique_graphs"])
    assert found[0] == found[1]
    assert found[0] > 0


def test_an_evaluation_compiles_nothing_and_sees_the_same(plain, monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    eager = build(plain)
    model = compile_model(copy.deepcopy(eager), whole=isinstance(plain, DiTConfig))
    torch._dynamo.reset()
    counters.clear()
    model(*inputs()).square().mean().backward()
    compiled = counters["stats"]["unique_graphs"]
    assert compiled > 0
    with torch.no_grad(), uncompiled():
        out = model.eval()(*inputs(2))
        assert torch.equal(out, eager.eval()(*inputs(2)))
    assert counters["stats"]["unique_graphs"] == compiled


KILLED = "g++: fatal error: Killed signal terminated program cc1plus"
STUB = "an empty file in torch's cache"
FOREIGN = "an empty file elsewhere"


@pytest.mark.parametrize(
    "right_for, said",
    [
        ((None, 256), "compiled code is right"),
        ((256,), "compiled again: for AVX2"),
        ((), "continuing uncompiled: compiled code is wrong here"),
        (KILLED, f"continuing uncompiled: {KILLED}"),
        (STUB, "compiled code is right"),
        (FOREIGN, "continuing uncompiled: OSError"),
    ],
)
def test_wrong_compiled_code_is_found_and_replaced(right_for, said, tmp_path, monkeypatch, capsys):
    """Code of one wrong gradient of a new model, where most are 0, or none, as the compiler fails or left an empty file
    when it was killed: that file is made anew, and no other deleted. Right code is compiled once; no weight changes."""
    cache = tmp_path / "a cache"
    cache.mkdir()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
    stub = (tmp_path if right_for == FOREIGN else cache) / "c2.main.so"
    stub.touch()

    def backward(graph, inputs):
        if right_for in (STUB, FOREIGN):
            if stub.exists():
                ctypes.CDLL(str(stub))
            return make_boxed_func(graph.forward)
        if right_for == KILLED:
            raise RuntimeError(f"C++ compile error\n{KILLED}\ncompilation terminated.")

        def run(*args):
            grads = [*graph(*args)]
            i = next(i for i, grad in enumerate(grads) if grad is not None)
            grads[i] = grads[i] * (1 if inductor.cpp.simdlen in right_for else 1.5)
            return grads

        return make_boxed_func(run)

    forward = lambda graph, inputs: make_boxed_func(graph.forward)
    backend = aot_autograd(fw_compiler=forward, bw_compiler=backward)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    raw = build_model(CONFIGS["modern"], "cpu", 0)
    x, t, y = inputs()
    assert compiled(raw, torch.device("cpu"), 1, compile=False) is raw
    torch._dynamo.reset()
    copied = copy.deepcopy(raw)
    stats = counters["stats"]
    checked = Checked(copied, compile_model(copied, whole="AVX2" not in said))
    generator = torch.get_rng_state()
    with inductor.patch({"cpp.simdlen": None}), torch.compiler.set_stance("default"):
        raw(x, t, y=y).sum().backward()
        checked(x, t, y=y).sum().backward()
        graphs = stats["unique_graphs"]
        checked(x, t, y=y)
    assert stats["unique_graphs"] == graphs
    assert torch.equal(torch.get_rng_state(), generator)
    lines = capsys.readouterr().out.splitlines()
    assert said in lines[1 if "AVX2" in said else -1]
    assert stub.exists() == (right_for != STUB)
    if right_for == KILLED:
        assert len(lines) == 1
    for p, q in zip(raw.parameters(), copied.parameters()):
        assert torch.equal(p, q)
        assert torch.allclose(p.grad, q.grad)


def test_checking_compiled_code_waits_for_weights_on_their_way(monkeypatch):
    """Other ranks' arrive when the model begins to compute: zeros until then are no new model's."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    raw = build_model(CONFIGS["modern"], "cpu", 0)
    sent = filled(CONFIGS["modern"]).state_dict()

    def arrive(*_):
        raw.load_state_dict(sent)
        arrival.remove()

    arrival = raw.register_forward_pre_hook(arrive)
    x, t, y = inputs()
    Checked(raw, compile_model(raw, False))(x, t, y=y)
    for name, p in raw.state_dict().items():
        assert torch.equal(p, sent[name])


@pytest.mark.parametrize(
    "name, more",
    [
        ("low_res", {"low_res": 4}),
        ("given", {"given_channels": 3}),
    ],
)
def test_a_second_image_is_read_at_any_size(config, name, more):
    model = build(config, **more)
    x, t, y = inputs()
    low = torch.randn(3, 3, 4, 4)
    large = torch.rand(3, 3, 64, 64)
    out = lambda image: model(x, t, y, **{name: image})
    full = torch.nn.functional.interpolate(low, (16, 16), mode="bilinear")
    assert torch.equal(out(low), out(full))
    small = torch.nn.functional.avg_pool2d(large, 4)
    torch.testing.assert_close(out(large), out(small), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(out(low), out(-low))
    mps = SimpleNamespace(  # takes but whole pixels
        is_mps=True,
        cpu=lambda: large,
        shape=large.shape,
        device="cpu",
    )
    odd = replace(model.config, low_res=6)
    on_mps = made_from(mps, odd)["low_res"]
    assert torch.equal(on_mps, made_from(large, odd)["low_res"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_follows_fp32(config, dtype):
    """Blocks pass on what their products have; only a DiT's in fp16, whose range is small, pass on fp32."""
    is_unet = isinstance(config, UNetConfig)
    layout = torch.channels_last if is_unet else torch.contiguous_format
    model = build(config, image_size=8).to(memory_format=layout)  # small, as fp16 is slow on a CPU
    x, t, y = inputs(1, size=8)
    exact = model(x, t, y)
    seen = set()
    for block in model.modules():
        if type(block).__name__ in ("Block", "ResBlock", "AttentionBlock", "Upsample"):
            block.register_forward_hook(lambda block, args, out: seen.add(out.dtype))
    with torch.autocast("cpu", dtype=dtype):
        out = model(x.to(memory_format=layout), t, y)
    if is_unet:
        assert out.dtype == torch.float32
    passed_on = dtype if is_unet or dtype == torch.bfloat16 else torch.float32
    assert seen == {passed_on}
    error = (out - exact).norm() / exact.norm()
    assert 0 < error < 4 * torch.finfo(dtype).eps
    out.square().mean().backward()
    for p in model.parameters():
        assert p.grad.dtype == torch.float32
        assert p.grad.isfinite().all()


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"vector_dim": 7},
        {"vector_dim": 7, "vector_len": 5},
        {"given_channels": 2},
    ],
)
def test_a_condition_matters_to_its_image_alone_and_null_differs_from_every_value(config, more):
    """Also from zeros, which are the mean of vectors and a grey image; words have an order."""
    model = build(config, **more)
    x, t, y = inputs()
    cond = some_conditions(model.config, 3) | {"y": y}
    null = conditioning(model.config, cond, is_dropped=torch.ones(3, dtype=torch.bool))
    assert null["y"].tolist() == [5] * 3
    for name in null.keys() - {"y"}:
        assert null[name].isnan().all()
    changes = [(cond, "t", t + 50)]
    for name in cond:
        changes.append((cond, name, null[name]))
        changes.append((cond, name, cond[name] + 1))
    if "vector_len" in more:
        words = torch.eye(5, 7).expand(3, 5, 7)
        changes.append((cond | {"vectors": words}, "vectors", words.flip(1)))
    for before, name, values in changes:
        mixed = {"t": t} | before
        mixed[name] = torch.cat([values[:1], mixed[name][1:]])
        difference = model(x, **mixed) - model(x, t, **before)
        moved = difference.flatten(1).abs().amax(1)
        assert moved[0] > 1e-3, name
        assert moved[1:].max() < 1e-4, name


def test_a_model_without_classes_has_no_table_of_them(config):
    model = build(config, num_classes=0)
    x, t, y = inputs()
    for name in model.state_dict():
        assert "label" not in name
        assert "y_embed" not in name
    assert torch.equal(model(x, t, y), model(x, t))
