"""The fp16 loss scale: its published walk, skipped steps, and a NaN that stays."""

import json

import pytest
import torch

from nanodiff.training.amp import LossScaler


def test_walk_is_the_published_one():
    """log2 of the scale: 20 at first, +0.001 per good step, -1 per overflow (IDDPM's fp16 trainer)."""
    scaler = LossScaler(enabled=True)
    assert scaler.lg_loss_scale == 20.0
    for _ in range(1000):
        scaler.update(found_inf=False)
    assert scaler.lg_loss_scale == pytest.approx(21.0)
    for overflow in (True, True, False, True):
        scaler.update(overflow)
    assert scaler.lg_loss_scale == pytest.approx(21.0 - 3 + 0.001)
    assert (scaler.steps, scaler.skipped, scaler.skipped_in_a_row) == (1004, 3, 1)


def test_gradients_times_inv_scale_are_those_of_the_plain_loss():
    w = torch.randn(5, generator=torch.Generator().manual_seed(0), requires_grad=True)
    loss = lambda: (w**3).sum()
    (plain,) = torch.autograd.grad(loss(), w)
    scaler = LossScaler(enabled=True)  # a power of two: exact in floating point
    (scaled,) = torch.autograd.grad(scaler.scale(loss()), w)
    assert torch.equal(scaled * scaler.inv_scale, plain) and not torch.equal(scaled, plain)


def test_scale_saves_gradients_from_underflow():
    """A gradient of 1e-9 is zero in fp16 (whose least number is 6e-8) but comes through the scaled loss."""
    grads = []
    for enabled in (False, True):
        scaler, x = LossScaler(enabled), torch.ones(1, requires_grad=True)
        scaler.scale(x.half().float() * 1e-9).sum().backward()
        grads.append(x.grad.item() * scaler.inv_scale)
    assert grads[0] == 0.0 and grads[1] == pytest.approx(1e-9, rel=1e-2)


def test_training_survives_an_overflow_and_finds_a_scale():
    """From a scale that overflows fp16, skipped steps bring it down until steps are good; weights stay finite."""
    scaler, w = LossScaler(enabled=True, lg_scale=30.0), torch.full((4,), 2.0, requires_grad=True)
    optimizer, good = torch.optim.SGD([w], lr=0.1), 0
    for _ in range(60):
        scaler.scale((w.half() ** 2).mean().float()).backward()
        norm = w.grad.norm().item() * scaler.inv_scale
        overflow = not norm < float("inf")
        if not overflow:
            w.grad *= scaler.inv_scale
            optimizer.step()
            good += 1
        scaler.update(overflow)
        optimizer.zero_grad()
    assert scaler.skipped + good == 60 and scaler.skipped >= 13  # 2^30 to below fp16's 2^16 takes more than 13 skips
    assert scaler.lg_loss_scale < 17 and good > 40
    assert w.abs().max() < 2.0  # it trained


def test_a_nan_that_stays_ends_the_run_with_the_count():
    scaler = LossScaler(enabled=True)
    for _ in range(7):
        scaler.update(found_inf=False)
    skips = 0
    with pytest.raises(FloatingPointError, match=r"21 steps skipped in a row, 21 of 28"):
        for _ in range(100):
            skips += 1
            scaler.update(found_inf=True)
    assert skips == 21


def test_disabled_scaler_is_the_identity():
    scaler, loss = LossScaler(enabled=False), torch.tensor(3.0)
    assert scaler.scale(loss) is loss and scaler.inv_scale == 1.0
    for _ in range(100):
        scaler.update(found_inf=True)
    assert scaler.inv_scale == 1.0


def test_state_survives_json_and_a_change_of_dtype():
    a, b, off = LossScaler(enabled=True), LossScaler(enabled=True), LossScaler(enabled=False)
    for i in range(50):
        a.update(found_inf=i % 20 == 19)
    b.load_state_dict(json.loads(json.dumps(a.state_dict())))
    for scaler in (a, b):
        scaler.update(found_inf=True)
    assert a.state_dict() == b.state_dict()
    off.load_state_dict(a.state_dict())  # an fp16 run that goes on in bf16
    assert off.inv_scale == 1.0
    b = LossScaler(enabled=True)
    b.load_state_dict(LossScaler(enabled=False).state_dict())  # a bf16 run that goes on in fp16
    assert b.lg_loss_scale == 20.0
