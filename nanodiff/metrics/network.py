"""The base class of the networks that judge samples; accuracy by class."""

import numpy as np
import torch
from torch import Tensor, nn

from nanodiff.device import full_float32


class Network(nn.Module):
    """Images (N, C, H, W) uint8 -> features (N, num_features), logits (N, K).

    Subclasses have a `name` for file names and a `title` for messages.
    """

    batch_size = 64
    num_classes = 0  # above 0 if the logits are for the data set's classes

    @torch.no_grad()
    def features(self, images) -> tuple[Tensor, Tensor]:
        """`forward` in batches, for any tensor or array of images; returns float32 on the CPU."""
        device = next(self.parameters()).device
        with full_float32(device):  # the caller may be sampling under autocast
            batches = torch.as_tensor(images).split(self.batch_size)
            outputs = [self(batch.to(device)) for batch in batches]
        features, logits = map(torch.cat, zip(*outputs))
        return features.cpu(), logits.cpu()


def share_by_class(
    is_right: np.ndarray,
    labels: np.ndarray,
    class_names: list[str],
    name: str,
) -> dict:
    """{name: the share of images that are right, name_of: {class: its share}}, of `is_right` and `labels` (N,)."""
    by_class = {}
    for k, class_name in enumerate(class_names):
        members = labels == k
        if members.any():
            by_class[class_name] = round(float(is_right[members].mean()), 4)
    return {name: float(is_right.mean()), f"{name}_of": by_class}
