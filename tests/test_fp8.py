"""fp8 products are near fp32's; runs with them, emulated, are near bf16's, resume, and do not depend on the ranks."""

import pytest
import torch
from conftest import refused
from processes import run_process
from tiny_runs import TINY, assert_resumes, losses, make_data

from nanodiff.models import fp8
from nanodiff.models.build import build_model
from nanodiff.models.dit import DiTConfig
from nanodiff.models.fp8 import E4M3, E5M2, product, scale_for, to_fp8

TINY = [*TINY, "--total_batch_size=16", "--num_iterations=6", "--eval_every=3", "--log_every=1", "--dtype=bfloat16"]


@pytest.mark.parametrize(
    "dtype, tolerance, headroom",
    [
        (E4M3, 0.04, 2),
        (E5M2, 0.07, 64),
    ],
)
@pytest.mark.parametrize("tail", [0, 1.5])
def test_products_are_near_those_of_fp32(dtype, tolerance, headroom, tail):
    torch.manual_seed(0)
    heavy_tailed = lambda n: torch.randn(n, 64) * torch.randn(n, 64).mul(tail).exp()
    a = heavy_tailed(48)
    b = heavy_tailed(32)
    scale = scale_for(a, dtype, headroom)
    exact = a @ b.T
    found = product(to_fp8(a, scale, dtype), scale, b, scale_for(b, E4M3))
    error = found.float() - exact
    assert error.norm() < tolerance * exact.norm()
    a[0, 0] = 100 * a.abs().amax()  # after the calibration: clamped
    assert float(to_fp8(a, scale, dtype)[0, 0]) == torch.finfo(dtype).max


def emulate():
    """The same numbers, multiplied in fp32: torch's own product on a CPU takes seconds."""
    fp8.is_fast = lambda device: True

    def scaled_mm(a, b, scale_a, scale_b, **_):
        exact = (a.float() * scale_a) @ (b.float() * scale_b)
        return exact.bfloat16()

    torch._scaled_mm = scaled_mm


def test_scales_lie_where_cublas_takes_them(monkeypatch):
    monkeypatch.setattr(fp8, "is_fast", lambda device: True)
    config = DiTConfig(8, 3, 3, patch_size=4, width=16, depth=2, heads=4)
    model = build_model(config, torch.device("cpu"), seed=0)
    fp8.use_fp8(model, torch.device("cpu"), torch.bfloat16)
    layers = [layer for layer in model.modules() if isinstance(layer, fp8.Linear)]
    assert len(layers) == 8
    for layer in layers:
        assert layer.x_scale.data_ptr() % 16 == 0
        assert layer.g_scale.data_ptr() % 16 == 0


@pytest.mark.slow
def test_a_run_in_fp8(base, run_script, monkeypatch):
    make_data(train=72)
    refused("fp8=True needs a Hopper GPU", run_script, "base_train", *TINY, "--fp8=True")
    for module, name in (
        (fp8, "is_fast"),
        (torch, "_scaled_mm"),
    ):
        monkeypatch.setattr(module, name, None)  # to be undone
    emulate()
    assert_resumes(base, run_script, *TINY, "--fp8=True")
    run_script("base_train", *TINY, "--model_tag=bf16")
    run_process("base_train", *TINY, "--fp8=True", "--device_batch_size=8", "--model_tag=two", ranks=2, before=emulate)
    assert losses(base, "two") == pytest.approx(losses(base, "whole"), rel=1e-3)
    assert losses(base, "whole") == pytest.approx(losses(base, "bf16"), rel=1e-2)
    assert losses(base, "whole") != losses(base, "bf16")
