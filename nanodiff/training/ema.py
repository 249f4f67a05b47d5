"""Exponential moving averages of the weights, at several rates at once."""

import math
from contextlib import contextmanager

import torch

from nanodiff.common import UserError


def parse_rates(rates: str | float | tuple[float, ...]) -> tuple[float, ...]:
    """(0.999, 0.9999) from "0.999,0.9999", from one number or from a sequence; () from "" or ().

    Raises UserError for what is not a number between 0 and 1, both excluded.
    """
    items = rates.split(",") if isinstance(rates, str) else rates if isinstance(rates, list | tuple) else [rates]
    parsed = []
    for item in items if rates != "" else []:
        try:
            parsed.append(float(item))
        except (TypeError, ValueError):
            parsed.append(math.nan)
        if not 0 < parsed[-1] < 1:
            raise UserError(f"ema_rates={rates!r} has {item!r}; accepted: numbers between 0 and 1, such as 0.999")
    return tuple(dict.fromkeys(parsed))


class EMA:
    """average <- rate * average + (1 - rate) * weights, in fp32, of every trainable parameter, for each of `rates`.

    With `ramp` the rate of step s is min(rate, (1 + s) / (10 + s)), so that an average soon forgets the initial weights
    (TensorFlow's ExponentialMovingAverage with num_updates); without it, it is constant, as in the papers of DDPM,
    IDDPM and DiT. An average starts as the weights themselves.
    """

    @torch.no_grad()
    def __init__(self, model: torch.nn.Module, rates="0.999", ramp: bool = True):
        self.rates, self.ramp = parse_rates(rates), ramp
        model = getattr(model, "_orig_mod", model)  # of torch.compile
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.names, self.params = list(named), list(named.values())
        self.averages = {rate: [p.detach().float().clone() for p in self.params] for rate in self.rates}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after optimizer step number `step` (1, 2, ...)."""
        for rate, averages in self.averages.items():
            if self.ramp:
                rate = min(rate, (1 + step) / (10 + step))
            torch._foreach_lerp_(averages, self.params, 1 - rate)

    @contextmanager
    def applied(self, rate: float | str | None = None):
        """`with ema.applied(0.999):` the model has the averaged weights; then, bit for bit, its own again.

        None stands for the first rate, or for no change where no average is kept.

        Values are copied in place, so a compiled model and the optimizer's views stay valid. Do not update inside.
        Raises UserError for a rate that is not kept.
        """
        if rate is None and not self.rates:
            yield
            return
        averages = self._of(self.rates[0] if rate is None else rate)
        with torch.no_grad():
            saved = [p.detach().clone() for p in self.params]
            torch._foreach_copy_(self.params, averages)
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(self.params, saved)

    def _of(self, rate):
        try:
            return self.averages[float(rate)]
        except (KeyError, ValueError):
            kept = ", ".join(map(str, self.rates)) or "none"
            raise UserError(f"ema rate {rate!r} is not kept; kept: {kept}") from None

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        """{"0.999": {name: average}}: named as in the model's state_dict; the tensors themselves, not copies."""
        return {str(rate): dict(zip(self.names, averages)) for rate, averages in self.averages.items()}

    @torch.no_grad()
    def load_state_dict(self, state: dict) -> None:
        """Take averages of the same rates, names and shapes; else UserError naming the first that differs."""
        if {str(rate) for rate in self.rates} != state.keys():
            raise UserError(
                f"ema_rates={','.join(map(str, self.rates))!r} differs from what was saved: {','.join(state)!r}"
            )
        for rate, mine in self.state_dict().items():
            for name in sorted(mine.keys() ^ state[rate].keys()):
                raise UserError(f"ema {rate}: {name!r} is {'missing' if name in mine else 'unknown here'}")
            for name, average in mine.items():
                if average.shape != state[rate][name].shape:
                    shapes = tuple(state[rate][name].shape), tuple(average.shape)
                    raise UserError(f"ema {rate}: {name!r} has shape {shapes[0]}, not {shapes[1]}")
        for rate, averages in self.state_dict().items():
            for name, average in averages.items():
                average.copy_(state[rate][name])
