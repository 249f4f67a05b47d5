"""What the judges have in common: Inception and the classifier."""

import torch
import torch.nn as nn

from nanodiff.device import full_float32


class Network(nn.Module):
    """Images (N, C, H, W) uint8 -> features (N, num_features), logits (N, K).

    A network also has a `name`, for names of files, and a `title`, for messages.
    """

    batch_size = 64

    @torch.no_grad()
    def features(self, images) -> tuple[torch.Tensor, torch.Tensor]:
        """`forward` in batches, for any tensor or array of images; returns float32 on the CPU."""
        device = next(self.parameters()).device
        with full_float32(device):  # the caller may be sampling under autocast
            found = [self(batch.to(device)) for batch in torch.as_tensor(images).split(self.batch_size)]
        features, logits = zip(*found)
        return torch.cat(features).cpu(), torch.cat(logits).cpu()
