"""Exponential moving averages of the weights, at several rates at once."""

from contextlib import contextmanager

import torch

from nanodiff.common import UserError


def parse_rates(rates: str) -> tuple[float, ...]:
    """(0.999, 0.9999) from "0.999,0.9999"; () from ""."""
    try:
        parsed = tuple(float(rate) for rate in rates.split(",")) if rates else ()
    except ValueError:
        parsed = (0.0,)
    if not all(0 < rate < 1 for rate in parsed):
        raise UserError(f"ema_rates={rates!r}; accepted: numbers between 0 and 1, comma-separated, such as 0.999")
    return tuple(dict.fromkeys(parsed))


class EMA:
    """average <- rate * average + (1 - rate) * weights, in fp32, of every parameter, for each of `rates`.

    With `ramp` the rate of step s is min(rate, (1 + s) / (10 + s)), so that an average soon forgets the initial weights
    (TensorFlow's ExponentialMovingAverage with num_updates). An average starts as the weights.
    """

    @torch.no_grad()
    def __init__(self, model: torch.nn.Module, rates: str = "0.999", ramp: bool = True):
        self.rates, self.ramp = parse_rates(rates), ramp
        named = dict(model.named_parameters())
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
    def applied(self, model: torch.nn.Module):
        """Inside, the model is in eval mode with the average of the first rate, if any; then its own weights return.

        Values are copied in place, so a compiled model and the optimizer's views stay valid. Do not update inside.
        """
        training, averages = model.training, next(iter(self.averages.values()), self.params)
        with torch.no_grad():
            saved = [p.detach().clone() for p in self.params]
            torch._foreach_copy_(self.params, averages)
        model.eval()
        try:
            yield
        finally:
            model.train(training)
            with torch.no_grad():
                torch._foreach_copy_(self.params, saved)

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        """{"0.999": {name: average}}: the tensors themselves, not copies."""
        return {str(rate): dict(zip(self.names, averages)) for rate, averages in self.averages.items()}

    @torch.no_grad()
    def load_state_dict(self, state: dict) -> None:
        """Load a state_dict's averages; a rate that it lacks starts from the weights."""
        weights = dict(zip(self.names, self.params))
        for rate, averages in self.state_dict().items():
            for name, average in averages.items():
                average.copy_(state.get(rate, weights)[name])
