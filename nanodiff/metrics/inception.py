"""The network of the FID: Inception-v3 with the weights of 2015, as ported by pytorch-fid.

It differs from torchvision's network: 1008 outputs, average pools that ignore the padding, a max pool in the last
block, and TensorFlow 1's resize. Other weights or another resize give figures that do not compare with published ones.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from nanodiff.common import UserError, base_dir, get_dist
from nanodiff.dist import wait_for_first_rank
from nanodiff.files import download, load_tensors, sha256_of
from nanodiff.metrics.network import Network

FILE_NAME = "pt_inception-2015-12-05-6726825d.pth"
URL = f"https://github.com/mseitzer/pytorch-fid/releases/download/fid_weights/{FILE_NAME}"
NUM_BYTES = 95_628_359
SHA256 = "6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2"


class Inception(Network):
    """FID Inception-v3 (Szegedy et al. 2015): (N, C, H, W) uint8 -> pool3 (N, 2048), logits (N, 1008).

    C is 1 or 3.
    """

    name = "inception"
    title = "Inception-v3 of 2015, pytorch-fid's weights"
    num_features = 2048

    def __init__(self):
        super().__init__()
        # In the order of the forward pass
        self.Conv2d_1a_3x3 = Conv(3, 32, 3, stride=2, padding=0)
        self.Conv2d_2a_3x3 = Conv(32, 32, 3, padding=0)
        self.Conv2d_2b_3x3 = Conv(32, 64, 3)
        self.pool_1 = nn.MaxPool2d(3, stride=2)  # (N, 64, 73, 73)
        self.Conv2d_3b_1x1 = Conv(64, 80, 1)
        self.Conv2d_4a_3x3 = Conv(80, 192, 3, padding=0)
        self.pool_2 = nn.MaxPool2d(3, stride=2)  # (N, 192, 35, 35)
        self.Mixed_5b = Mixed(192, A, pool_width=32)
        self.Mixed_5c = Mixed(256, A, pool_width=64)
        self.Mixed_5d = Mixed(288, A, pool_width=64)
        self.Mixed_6a = Mixed(288, B, HALVING_POOL, 0)  # (N, 768, 17, 17)
        self.Mixed_6b = Mixed(768, C(128))
        self.Mixed_6c = Mixed(768, C(160))
        self.Mixed_6d = Mixed(768, C(160))
        self.Mixed_6e = Mixed(768, C(192))
        self.Mixed_7a = Mixed(768, D, HALVING_POOL, 0)  # (N, 1280, 8, 8)
        self.Mixed_7b = Mixed(1280, E)
        self.Mixed_7c = Mixed(2048, E, MAX_POOL)  # a slip of 2015, now part of the FID's definition
        self.fc = nn.Linear(2048, 1008)

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = images.float().expand(-1, 3, -1, -1)  # (N, 3, H, W): gray images as three equal channels
        x = (resize(x, 299) - 128) / 128  # (N, 3, 299, 299)
        *layers, fc = self.children()
        for layer in layers:
            x = layer(x)  # at last (N, 2048, 8, 8)
        pool3 = x.mean((2, 3))
        return pool3, pool3 @ fc.weight.T  # the Inception score is defined without the bias


def resize(x: torch.Tensor, size: int) -> torch.Tensor:
    """(N, C, H, W) -> (N, C, size, size), as TensorFlow 1's resize_bilinear.

    Output pixel i is read at i * H / size, where torch aligns pixel centres. Nothing is smoothed before shrinking.
    """

    def weights(n):  # (size, n): a row has 1 - distance at the two pixels beside where it is read
        where = torch.arange(size, device=x.device) * (n / size)
        distance = where.clamp(max=n - 1)[:, None] - torch.arange(n, device=x.device)
        return (1 - distance.abs()).clamp(min=0)

    height, width = x.shape[2:]
    return weights(height) @ x @ weights(width).T


class Conv(nn.Module):  # with batch normalisation and ReLU
    def __init__(self, n_in, n_out, kernel, stride=1, padding="same"):
        super().__init__()
        self.conv = nn.Conv2d(n_in, n_out, kernel, stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(n_out, eps=1e-3)

    def forward(self, x):
        return F.relu(self.bn(self.conv(x)), inplace=True)


AVERAGE_POOL = nn.AvgPool2d(3, stride=1, padding=1, count_include_pad=False)
MAX_POOL = nn.MaxPool2d(3, stride=1, padding=1)
HALVING_POOL = nn.MaxPool2d(3, stride=2)


class Mixed(nn.Module):
    """Branches side by side, concatenated along channels, the pooled input last.

    `branches`: name -> chain of (n_out, kernel[, stride, padding]); kernel "fork" is a 1x3 and a 3x1 convolution side
    by side.
    `pool_width`: channels of a 1x1 convolution after the pool, 0 = none.
    """

    def __init__(self, n_in, branches, pool=AVERAGE_POOL, pool_width=192):
        super().__init__()
        self.pool = pool
        self.chains = []  # one per branch: a list of steps, each the names of its convolutions
        for branch, chain in branches.items():
            width = n_in
            steps = []
            for i, (n_out, kernel, *moves) in enumerate(chain, start=1):
                name = f"branch{branch}_{i}" if len(chain) > 1 else f"branch{branch}"
                kernels = {name: kernel}
                if kernel == "fork":
                    kernels = {name + "a": (1, 3), name + "b": (3, 1)}
                for key, size in kernels.items():
                    self.add_module(key, Conv(width, n_out, size, *moves))
                steps.append(list(kernels))
                width = n_out
            self.chains.append(steps)
        self.branch_pool = Conv(n_in, pool_width, 1) if pool_width else nn.Identity()

    def forward(self, x):
        outputs = []
        for steps in self.chains:
            y = x
            for names in steps:
                y = torch.cat([getattr(self, name)(y) for name in names], 1)
            outputs.append(y)
        pooled = self.pool(x)
        outputs.append(self.branch_pool(pooled))
        return torch.cat(outputs, 1)


# The branches of each kind of block
ROW = (1, 7)
COLUMN = (7, 1)
A = {
    "1x1": [(64, 1)],
    "5x5": [(48, 1), (64, 5)],
    "3x3dbl": [(64, 1), (96, 3), (96, 3)],
}
B = {
    "3x3": [(384, 3, 2, 0)],
    "3x3dbl": [(64, 1), (96, 3), (96, 3, 2, 0)],
}
D = {
    "3x3": [(192, 1), (320, 3, 2, 0)],
    "7x7x3": [(192, 1), (192, ROW), (192, COLUMN), (192, 3, 2, 0)],
}
E = {
    "1x1": [(320, 1)],
    "3x3": [(384, 1), (384, "fork")],
    "3x3dbl": [(448, 1), (384, 3), (384, "fork")],
}


def C(width):
    single = [(width, 1), (width, ROW), (192, COLUMN)]
    double = [(width, 1), (width, COLUMN), (width, ROW), (width, COLUMN), (192, ROW)]
    return {"1x1": [(192, 1)], "7x7": single, "7x7dbl": double}


def load_inception(path: str = "", device="cpu") -> Inception:
    """The network with the weights in `path`, by default downloaded once. Called by all ranks."""
    default = base_dir() / FILE_NAME
    if not path and get_dist()[0] == 0 and not default.exists():
        download(URL, default, NUM_BYTES, SHA256, f"get the file elsewhere and save it as {default}")
    wait_for_first_rank()
    path = Path(path or default)
    weights = load_tensors(path)
    if sha256_of(path) != SHA256:
        raise UserError(f"{path} is not the published file of Inception's weights, {URL}")
    model = Inception()
    model.load_state_dict(weights, strict=False)  # files older than torch 0.4.1 lack batch normalisation's counters
    return model.to(device).eval()
