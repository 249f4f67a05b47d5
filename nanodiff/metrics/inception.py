"""The network of the FID: Inception-v3 with the weights of 2015, as ported by pytorch-fid.

It differs from torchvision's network: 1008 outputs, average pools that ignore the padding, a max pool in the last
block, and TensorFlow 1's resize. Other weights or another resize give figures that do not compare with published ones.
"""

import re
from collections import OrderedDict, defaultdict

import torch
from torch import Tensor, nn

from nanodiff.common import Tensors, UserError, at, base_dir, is_first_rank
from nanodiff.dist import wait_for_first_rank
from nanodiff.files import download, load_tensors, sha256_of
from nanodiff.metrics.network import Network

FILE_NAME = "pt_inception-2015-12-05-6726825d.pth"
URL = f"https://github.com/mseitzer/pytorch-fid/releases/download/fid_weights/{FILE_NAME}"
NUM_BYTES = 95_628_359
SHA256 = "6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2"


class Inception(Network):
    """FID's Inception-v3 (Szegedy et al. 2015): (N, 1 or 3, H, W) uint8 -> pool3 (N, 2048), logits (N, 1008)."""

    name = "inception"
    title = "Inception-v3 of 2015, pytorch-fid's weights"
    num_features = 2048

    def __init__(self, weights: Tensors):
        """`weights`: from the published file; their names and shapes give each block's layers."""
        super().__init__()
        # In the order of the forward pass
        self.Conv2d_1a_3x3 = conv_bn_relu(3, 32, 3, stride=2, padding=0)
        self.Conv2d_2a_3x3 = conv_bn_relu(32, 32, 3, padding=0)
        self.Conv2d_2b_3x3 = conv_bn_relu(32, 64, 3)
        self.pool_1 = nn.MaxPool2d(3, stride=2)  # (N, 64, 73, 73)
        self.Conv2d_3b_1x1 = conv_bn_relu(64, 80, 1)
        self.Conv2d_4a_3x3 = conv_bn_relu(80, 192, 3, padding=0)
        self.pool_2 = nn.MaxPool2d(3, stride=2)  # (N, 192, 35, 35)
        shapes = defaultdict(dict)  # block -> {name of a convolution: shape of its kernels}
        for block, conv in re.findall(r"(Mixed\w+)\.(\w+)\.conv", " ".join(weights)):
            shapes[block][conv] = weights[f"{block}.{conv}.conv.weight"].shape
        for block, convs in shapes.items():  # from 6a on (N, 768, 17, 17), from 7a on (N, 1280, 8, 8), then 2048
            self.add_module(block, Mixed(convs))
        self.Mixed_7c.pool = nn.MaxPool2d(3, stride=1, padding=1)  # a slip of 2015, now part of the FID's definition
        self.fc = nn.Linear(2048, 1008)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        x = images.float().expand(-1, 3, -1, -1)  # (N, 3, H, W): gray images as three equal channels
        x = (resize(x, 299) - 128) / 128  # (N, 3, 299, 299)
        *layers, fc = self.children()
        for layer in layers:
            x = layer(x)  # finally (N, 2048, 8, 8)
        pool3 = x.mean((2, 3))
        return pool3, pool3 @ fc.weight.T  # the Inception score is defined without the bias


def resize(x: Tensor, size: int) -> Tensor:
    """(N, C, H, W) -> (N, C, size, size), as TensorFlow 1's resize_bilinear.

    Output pixel i is read at i * H / size (torch would align pixel centres). Nothing is smoothed before shrinking.
    """

    def weights(n):  # (size, n): each row has 1 - distance at the two pixels next to its position
        positions = torch.arange(size, device=x.device) * (n / size)
        distance = positions.clamp(max=n - 1)[:, None] - torch.arange(n, device=x.device)
        return (1 - distance.abs()).clamp(min=0)

    height, width = x.shape[2:]
    return weights(height) @ x @ weights(width).T


def conv_bn_relu(n_in: int, n_out: int, kernel, stride: int = 1, padding="same") -> nn.Sequential:
    layers = OrderedDict(
        conv=nn.Conv2d(n_in, n_out, kernel, stride, padding, bias=False),
        bn=nn.BatchNorm2d(n_out, eps=1e-3),
        relu=nn.ReLU(inplace=True),
    )
    return nn.Sequential(layers)


class Mixed(nn.Module):
    """Branches side by side, concatenated along channels, the pooled input last.

    `shapes`: name of a convolution -> (n_out, n_in, height, width). "branch3x3dbl_2" is step 2 of the branch "3x3dbl";
    "_3a" and "_3b" are step 3, side by side; "branch_pool" follows the pool. A block without branch_pool halves the
    image.
    """

    def __init__(self, shapes):
        super().__init__()
        halves = "branch_pool" not in shapes
        average = nn.AvgPool2d(3, stride=1, padding=1, count_include_pad=False)
        self.pool = nn.MaxPool2d(3, stride=2) if halves else average
        self.chains = defaultdict(lambda: defaultdict(list))  # branch -> step -> names of its convolutions
        last = {name.split("_")[0]: name for name in shapes}  # branch -> its last convolution
        for name, (n_out, n_in, *kernel) in shapes.items():
            branch, _, step = name.partition("_")
            self.chains[branch][step[:1]].append(name)
            moves = (2, 0) if halves and name == last[branch] else ()
            self.add_module(name, conv_bn_relu(n_in, n_out, kernel, *moves))
        self.chains.setdefault("branch", {})  # the pool's branch, if no convolution follows

    def forward(self, x):
        outputs = []
        for branch, steps in self.chains.items():
            y = self.pool(x) if branch == "branch" else x
            for names in steps.values():
                y = torch.cat([getattr(self, name)(y) for name in names], 1)
            outputs.append(y)
        return torch.cat(outputs, 1)


def load_inception(path: str, device) -> Inception:
    """The network with the weights in `path`; "" = downloaded once. Called by all ranks."""
    default = base_dir() / FILE_NAME
    if not path and is_first_rank() and not default.exists():
        download(URL, default, NUM_BYTES, SHA256, f"get the file elsewhere and save it as {default}")
    wait_for_first_rank()
    path = at(path or default)
    weights = load_tensors(path)
    if sha256_of(path) != SHA256:
        raise UserError(f"{path} is not the published file of Inception's weights, {URL}")
    model = Inception(weights)
    model.load_state_dict(weights, strict=False)  # files older than torch 0.4.1 lack batch normalisation's counters
    return model.to(device).eval()
