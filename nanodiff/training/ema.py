"""Exponential moving averages of the weights, at several rates at once."""

from contextlib import contextmanager

import torch

from nanodiff.common import Tensors, UserError, print0
from nanodiff.device import host_copy
from nanodiff.dist import collective
from nanodiff.training.shard import Optimizer


def parse_rates(rates: str) -> list[float]:
    """[0.999, 0.9999] from "0.999,0.9999"; [] from ""."""
    try:
        numbers = [float(rate) for rate in rates.split(",") if rates]
    except ValueError:
        numbers = [0.0]
    if not all(0 < rate < 1 for rate in numbers):
        raise UserError(f"ema_rates={rates!r}; accepted: numbers between 0 and 1, comma-separated, such as 0.999")
    return numbers


class EMA:
    """average <- rate * average + (1 - rate) * weights, in fp32, of what learns, for each of `rates`.

    An average starts as the weights. With `ramp` the rate of step s is min(rate, (1 + s) / (10 + s)), so that it soon
    forgets them (TensorFlow's ExponentialMovingAverage with num_updates). Each rank averages its share of the
    optimizer's buffers.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optim: Optimizer,
        rates: str = "0.999",
        ramp: bool = True,
    ):
        self.rates = parse_rates(rates)
        self.ramp = ramp
        self.optim = optim
        self.buffers = optim.buffers
        state = model.state_dict()  # of a model with adapters, only what learns
        self.frozen = {name: p for name, p in model.named_parameters() if name in state and not p.requires_grad}
        self.weights = [buffer.weights for buffer in self.buffers]
        self.averages = {rate: [x.clone() for x in self.weights] for rate in self.rates}

    def update(self, step: int) -> None:
        """Average in the weights after optimizer step number `step` (1, 2, ...)."""
        for rate, averages in self.averages.items():
            if self.ramp:
                rate = min(rate, (1 + step) / (10 + step))
            torch._foreach_lerp_(averages, self.weights, 1 - rate)

    @contextmanager
    def applied(self, model: torch.nn.Module):
        """A collective: inside, the model is in eval mode with the average of the first rate, if any; then its own
        weights return.

        Values are copied in place, so a compiled model and the optimizer's views stay valid; autocast's cached copies
        do not, so they are cleared. Do not update inside.
        """
        training = model.training
        self.optim.wait_weights()
        weights = [buffer.flat.clone() for buffer in self.buffers]
        if self.rates:
            with collective("the all-gather of the averaged weights"):
                for buffer, average in zip(self.buffers, self.averages[self.rates[0]]):
                    buffer.flat.copy_(buffer.gathered(average))
        torch.clear_autocast_cache()
        model.eval()
        try:
            yield
        finally:
            torch.clear_autocast_cache()
            model.train(training)
            for buffer, flat in zip(self.buffers, weights):
                buffer.flat.copy_(flat)

    @collective("the all-gather of the averaged weights")
    def state_dict(self) -> dict[str, Tensors]:
        """A collective: {"ema_0.999": {name: average, on the CPU}}; complete only on rank 0."""
        state = {}
        for rate, averages in self.averages.items():
            tensors = host_copy(self.frozen)
            for buffer, average in zip(self.buffers, averages):
                tensors |= buffer.tensors(average)
            state[f"ema_{rate}"] = tensors
        return state

    def load_state_dict(self, state: dict) -> None:
        """Load a state_dict's averages; a rate that it lacks starts from the weights."""
        for rate, averages in self.averages.items():
            tensors = state.get(f"ema_{rate}")
            if not tensors:
                print0(f"note: the average {rate} is new: it starts from the current weights")
            for buffer, average in zip(self.buffers, averages):
                average.copy_(buffer.share_of(tensors) if tensors else buffer.weights)
