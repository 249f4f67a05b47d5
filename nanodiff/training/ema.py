"""Exponential moving averages of the weights, at several rates at once."""

from contextlib import contextmanager

import torch

from nanodiff.common import UserError


def parse_rates(rates: str) -> tuple[float, ...]:
    """(0.999, 0.9999) from "0.999,0.9999"; () from ""."""
    parsed = []
    for item in rates.split(",") if rates else []:
        try:
            parsed.append(float(item))
        except ValueError:
            parsed.append(0.0)
        if not 0 < parsed[-1] < 1:
            raise UserError(f"ema_rates={rates!r} has {item!r}; accepted: numbers between 0 and 1, such as 0.999")
    return tuple(dict.fromkeys(parsed))


class EMA:
    """average <- rate * average + (1 - rate) * weights, in fp32, of every parameter, for each of `rates`.

    With `ramp` the rate of step s is min(rate, (1 + s) / (10 + s)), so that an average soon forgets the initial weights
    (TensorFlow's ExponentialMovingAverage with num_updates); without it, it is constant, as in the papers of DDPM,
    IDDPM and DiT. An average starts as the weights themselves.
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
        """`with ema.applied(model):` the model is in eval mode and has the average of the first rate, if one is kept;
        afterwards, bit for bit, it has its own weights and mode again.

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
        """{"0.999": {name: average}}: named as in the model's state_dict; the tensors themselves, not copies."""
        return {str(rate): dict(zip(self.names, averages)) for rate, averages in self.averages.items()}

    @torch.no_grad()
    def load_state_dict(self, state: dict) -> None:
        """Take averages of the same names; the first mismatch is refused before anything is changed.

        The average of a rate that `state` lacks starts from the weights.
        """
        weights = dict(zip(self.names, self.params))
        state = {rate: state.get(rate, weights) for rate in self.state_dict()}
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
