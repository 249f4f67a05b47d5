"""Dynamic loss scale for fp16, IDDPM's way: on a log scale, up a little each good step, halved on overflow."""

import torch


class LossScaler:
    """Keeps small gradients above fp16's underflow by multiplying the loss with 2^lg_loss_scale (Nichol and Dhariwal).

    One step of the trainer, in this order:

        scaler.scale(loss).backward()
        grad_norm = float(optimizer.sync_grads()) * scaler.inv_scale  # over all ranks: Inf or NaN on any is seen by all
        overflow = not math.isfinite(grad_norm)
        if not overflow:
            optimizer.step(grad_scale=clip * scaler.inv_scale)
        scaler.update(overflow)

    With enabled=False (bf16, fp32) every method is the identity or does nothing.
    """

    def __init__(self, enabled: bool, lg_scale: float = 20.0, growth: float = 1e-3):
        self.enabled, self.growth = enabled, growth
        self.lg_loss_scale = lg_scale
        self.steps = self.skipped = self.skipped_in_a_row = 0

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to call backward on."""
        return loss * 2.0**self.lg_loss_scale if self.enabled else loss

    @property
    def inv_scale(self) -> float:
        """What the gradients are to be multiplied with: 2^-lg_loss_scale; 1 when disabled."""
        return 2.0**-self.lg_loss_scale if self.enabled else 1.0

    def update(self, found_inf: bool) -> None:
        """lg_loss_scale += growth after a good step, -= 1 after a skipped one.

        Raises FloatingPointError once the scale is below 1, which about 20 skips in a row take: a smaller scale will
        not cure that NaN. As every one of those steps was skipped, weights and averages are still good.
        """
        if not self.enabled:
            return
        self.steps += 1
        if not found_inf:
            self.lg_loss_scale += self.growth
            self.skipped_in_a_row = 0
            return
        self.lg_loss_scale -= 1.0
        self.skipped += 1
        self.skipped_in_a_row += 1
        if self.lg_loss_scale < 0:
            raise FloatingPointError(
                f"gradients are not finite: {self.skipped_in_a_row} steps skipped in a row, {self.skipped} of "
                f"{self.steps} in all, and the fp16 loss scale has fallen to 2^{self.lg_loss_scale:.3f}"
            )

    def state_dict(self) -> dict:
        keys = ("lg_loss_scale", "steps", "skipped", "skipped_in_a_row")
        return {key: getattr(self, key) for key in keys}

    def load_state_dict(self, state: dict) -> None:
        """Also into a disabled scaler and from one: a run may go on in another dtype."""
        self.__dict__.update({key: state[key] for key in self.state_dict()})
