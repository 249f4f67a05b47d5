"""Laws of the weight averages: the closed form, and that borrowing a model changes nothing."""

import pytest
import torch
import torch.nn as nn
from conftest import refused
from tiny_runs import make_optimizer

from nanodiff.training.ema import EMA, parse_rates


class Vector(nn.Module):
    def __init__(self, value=0.0):
        super().__init__()
        self.w = nn.Parameter(torch.full((3,), value))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)


@pytest.mark.parametrize("ramp", [False, True])
def test_a_jump_decays_as_the_product_of_the_rates(ramp):
    """Weights 0, then 1; the ramp's rate of step s is min(rate, (1 + s) / (10 + s))."""
    model = Vector(0.0)
    left = {0.5: 1.0, 0.95: 1.0, 0.9999: 1.0}
    ema = EMA(model, make_optimizer(model, "adamw"), "0.5,0.95,0.9999", ramp)
    model.w.data.fill_(1.0)
    for s in range(1, 301):
        ema.update(s)
        averages = ema.state_dict()
        for rate in left:
            left[rate] *= min(rate, (s + 1) / (s + 10)) if ramp else rate
            average = averages[f"ema_{rate}"]["w"][0].item()
            assert average == pytest.approx(1 - left[rate], abs=1e-5)


def test_applied_gives_the_average_and_takes_it_back_bit_for_bit():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1), nn.GroupNorm(2, 4))
    model.to(memory_format=torch.channels_last)
    ema = EMA(model, make_optimizer(model, "adamw"), "0.9,0.99", ramp=False)
    for p in model.parameters():
        nn.init.normal_(p)
    ema.update(1)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    pointers = [p.data_ptr() for p in model.parameters()]
    with pytest.raises(KeyboardInterrupt), ema.applied(model):
        assert not model.training
        for name, p in model.named_parameters():
            assert torch.equal(p, ema.state_dict()["ema_0.9"][name])
            assert not torch.equal(p, before[name])
        raise KeyboardInterrupt
    assert model.training
    for name, p in model.named_parameters():
        assert torch.equal(p.view(torch.int32), before[name].view(torch.int32))
    assert pointers == [p.data_ptr() for p in model.parameters()]


def test_autocast_computes_with_the_average():
    """Though it keeps the weights that it has cast."""
    model = nn.Linear(4, 4)
    ema = EMA(model, make_optimizer(model, "adamw"), "0.5", ramp=False)
    nn.init.normal_(model.weight)
    x = torch.ones(1, 4)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        before = model(x)
        with ema.applied(model):
            average = model(x)
        assert torch.equal(model(x), before)
        assert not torch.equal(average, before)


def test_rates():
    assert parse_rates("0.999, 0.9999") == [0.999, 0.9999]
    assert parse_rates("") == []
    model = Vector(1.0)
    ema = EMA(model, make_optimizer(model, "adamw"), "")
    ema.update(1)
    with ema.applied(model):
        assert model.w[0] == 1
        assert not model.training
    for bad in ("1", "0", "1.5", "-0.1", "nan", "x", "0.9,"):
        refused("ema_rates", parse_rates, bad)
