"""The network of the FID: Inception-v3 with the weights of 2015 (as pytorch-fid ported them), in plain torch.

It differs from torchvision's: 1008 outputs, averages that leave the padding out, a maximum in the last block's pool,
and TensorFlow 1's way to resize. With other weights or another resize the figures compare with nobody's.
"""

import hashlib
import http.client
import io
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

from nanodiff.common import Progress, UserError, base_dir, collective, get_dist, print0
from nanodiff.files import write_atomic

FILE_NAME = "pt_inception-2015-12-05-6726825d.pth"
URL = f"https://github.com/mseitzer/pytorch-fid/releases/download/fid_weights/{FILE_NAME}"
NUM_BYTES = 95_628_359
SHA256 = "6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2"


class Inception(nn.Module):
    """FID Inception-v3 (Szegedy et al. 2015): (N, C, H, W) uint8 -> means of five layers. load_inception builds it."""

    name, title = "inception", "Inception-v3 of 2015, pytorch-fid's weights"  # in the names of files, and in reports
    num_features = 2048

    def __init__(self):
        super().__init__()
        self.Conv2d_1a_3x3 = Conv(3, 32, 3, stride=2, padding=0)
        self.Conv2d_2a_3x3 = Conv(32, 32, 3, padding=0)
        self.Conv2d_2b_3x3 = Conv(32, 64, 3)
        self.Conv2d_3b_1x1 = Conv(64, 80, 1)
        self.Conv2d_4a_3x3 = Conv(80, 192, 3, padding=0)
        self.Mixed_5b = block_a(192, 32)
        self.Mixed_5c = block_a(256, 64)
        self.Mixed_5d = block_a(288, 64)
        self.Mixed_6a = block_b(288)
        self.Mixed_6b = block_c(768, 128)
        self.Mixed_6c = block_c(768, 160)
        self.Mixed_6d = block_c(768, 160)
        self.Mixed_6e = block_c(768, 192)
        self.Mixed_7a = block_d(768)
        self.Mixed_7b = block_e(1280, average_pool)
        self.Mixed_7c = block_e(2048, max_pool)  # a slip of the graph of 2015, part of the FID's definition since
        self.fc = nn.Linear(2048, 1008)

    def forward(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        """Means over the area of the outputs "64", "192", "768" and "2048" (pool3), (N, that many); "logits" (N, 1008).

        The logits are without the bias of the last layer, as the Inception score takes them.
        """
        x = images.float().expand(-1, 3, -1, -1)  # (N, 3, H, W), gray images as three equal channels
        x = (resize(x, 299) - 128) / 128  # (N, 3, 299, 299)
        x = self.Conv2d_2b_3x3(self.Conv2d_2a_3x3(self.Conv2d_1a_3x3(x)))
        x64 = F.max_pool2d(x, 3, 2)  # (N, 64, 73, 73)
        x192 = F.max_pool2d(self.Conv2d_4a_3x3(self.Conv2d_3b_1x1(x64)), 3, 2)  # (N, 192, 35, 35)
        x = self.Mixed_6a(self.Mixed_5d(self.Mixed_5c(self.Mixed_5b(x192))))
        x768 = self.Mixed_6e(self.Mixed_6d(self.Mixed_6c(self.Mixed_6b(x))))  # (N, 768, 17, 17)
        x2048 = self.Mixed_7c(self.Mixed_7b(self.Mixed_7a(x768)))  # (N, 2048, 8, 8)
        means = {str(v.shape[1]): v.mean((2, 3)) for v in (x64, x192, x768, x2048)}
        return means | {"logits": means["2048"] @ self.fc.weight.T}

    @torch.no_grad()
    def features(self, images, batch_size: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
        """(N, 1 or 3, H, W) uint8 images, tensor or array -> pool3 (N, 2048), logits (N, 1008), float32 on the CPU."""
        images = torch.as_tensor(images)
        assert images.dtype == torch.uint8 and images.ndim == 4 and images.shape[1] in (1, 3), images.shape
        pool3, logits = [], []
        with full_float32(), torch.autocast(self.fc.weight.device.type, enabled=False):
            for batch in images.split(batch_size):
                out = self(batch.to(self.fc.weight.device))
                pool3.append(out["2048"].cpu())
                logits.append(out["logits"].cpu())
        return torch.cat(pool3), torch.cat(logits)


def resize(x: torch.Tensor, size: int) -> torch.Tensor:
    """(N, C, H, W) -> (N, C, size, size) as TensorFlow 1's resize_bilinear, align_corners=False: output pixel i is read
    at i * H / size (not, as in torch, between the pixels' centres), and nothing is smoothed before shrinking."""

    def along_rows(x):  # (..., n) -> (..., size)
        n = x.shape[-1]
        where = torch.arange(size, dtype=torch.float32, device=x.device) * (n / size)
        low = where.long()
        high, fraction = (low + 1).clamp(max=n - 1), where - low
        return x[..., low] + (x[..., high] - x[..., low]) * fraction

    return along_rows(along_rows(x).transpose(2, 3)).transpose(2, 3)


@contextmanager
def full_float32():
    """No TF32 on CUDA within: it would move the features by a thousandth."""
    switches = torch.backends.cudnn, torch.backends.cuda.matmul
    before = [switch.allow_tf32 for switch in switches]
    try:
        for switch in switches:
            switch.allow_tf32 = False
        yield
    finally:
        for switch, value in zip(switches, before):
            switch.allow_tf32 = value


# ---------------------------------------------------------------------------------------------------------------------
# Blocks


class Conv(nn.Module):
    """Convolution, batch normalisation, ReLU; by default padded so that the size stays."""

    def __init__(self, n_in, n_out, kernel, stride=1, padding="same"):
        super().__init__()
        self.conv = nn.Conv2d(n_in, n_out, kernel, stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(n_out, eps=1e-3)

    def forward(self, x):
        return F.relu(self.bn(self.conv(x)), inplace=True)


def average_pool(x):
    return F.avg_pool2d(x, 3, stride=1, padding=1, count_include_pad=False)


def max_pool(x):
    return F.max_pool2d(x, 3, stride=1, padding=1)


def halving_max_pool(x):
    return F.max_pool2d(x, 3, stride=2)


class Mixed(nn.Module):
    """Branches side by side, concatenated on channels, the pooled input last.

    `branches`: name -> chain of (n_out, kernel) or, where it halves the size, (n_out, kernel, 2); "fork" as the kernel
    is a 1x3 and a 3x1 convolution side by side. `pool_width`: channels of the convolution after the pool, 0 = none.
    """

    def __init__(self, n_in, branches, pool, pool_width=0):
        super().__init__()
        self.pool, self.chains = pool, []  # chains: lists of steps, each the names of convolutions side by side
        for branch, chain in branches.items():
            width, steps = n_in, []
            for i, (n_out, kernel, *stride) in enumerate(chain, 1):
                name = f"branch{branch}_{i}" if len(chain) > 1 else f"branch{branch}"
                kernels = {name + "a": (1, 3), name + "b": (3, 1)} if kernel == "fork" else {name: kernel}
                for key, size in kernels.items():
                    self.add_module(key, Conv(width, n_out, size, 2, 0) if stride else Conv(width, n_out, size))
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
        return torch.cat([*outputs, self.branch_pool(self.pool(x))], 1)


def block_a(n_in, pool_width):  # 35 x 35
    branches = {"1x1": [(64, 1)], "5x5": [(48, 1), (64, 5)], "3x3dbl": [(64, 1), (96, 3), (96, 3)]}
    return Mixed(n_in, branches, average_pool, pool_width)


def block_b(n_in):  # 35 x 35 -> 17 x 17
    branches = {"3x3": [(384, 3, 2)], "3x3dbl": [(64, 1), (96, 3), (96, 3, 2)]}
    return Mixed(n_in, branches, halving_max_pool)


def block_c(n_in, width):  # 17 x 17
    row, column = (1, 7), (7, 1)
    single = [(width, 1), (width, row), (192, column)]
    double = [(width, 1), (width, column), (width, row), (width, column), (192, row)]
    return Mixed(n_in, {"1x1": [(192, 1)], "7x7": single, "7x7dbl": double}, average_pool, 192)


def block_d(n_in):  # 17 x 17 -> 8 x 8
    branches = {"3x3": [(192, 1), (320, 3, 2)], "7x7x3": [(192, 1), (192, (1, 7)), (192, (7, 1)), (192, 3, 2)]}
    return Mixed(n_in, branches, halving_max_pool)


def block_e(n_in, pool):  # 8 x 8
    branches = {"1x1": [(320, 1)], "3x3": [(384, 1), (384, "fork")], "3x3dbl": [(448, 1), (384, 3), (384, "fork")]}
    return Mixed(n_in, branches, pool, 192)


# ---------------------------------------------------------------------------------------------------------------------
# Weights


def load_inception(path: str | Path | None = None, device="cpu") -> Inception:
    """The FID's network on a device. Weights from `path`, else from $NANODIFF_BASE_DIR, else downloaded there, once.

    Called by all ranks; the first downloads. Raises UserError when the file is absent and cannot be had, or is not the
    published one (size and SHA-256).
    """
    default = base_dir() / FILE_NAME
    if not path and get_dist()[0] == 0 and not default.exists():
        download(default)
    if not path and dist.is_initialized():
        with collective("the wait for the first rank's download"):
            dist.barrier()
    path = Path(path or default)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"Inception weights {path} cannot be read: {error.strerror}; they are at {URL}") from None
    check(data, str(path))
    with torch.device("meta"):  # no time is spent on an initialisation
        model = Inception()
    weights = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    # Batch normalisation's counters say nothing at evaluation, and files of before torch 0.4.1 have none.
    counters = {name: torch.tensor(0) for name in model.state_dict() if name.endswith("num_batches_tracked")}
    model.load_state_dict(counters | dict(weights), strict=True, assign=True)
    return model.to(device).requires_grad_(False).eval()


def download(path: Path) -> None:
    print0(f"downloading {URL} ({NUM_BYTES / 1e6:.0f} MB, once)")
    data = bytearray()
    try:
        with urllib.request.urlopen(URL, timeout=60) as response, Progress(NUM_BYTES, "bytes", "downloading") as bar:
            while part := response.read(min(2**20, NUM_BYTES + 1 - len(data))):
                data += part
                bar.update(len(part))
    except (OSError, http.client.HTTPException) as error:  # URLError and timeouts are OSErrors
        raise UserError(f"cannot download {URL} ({error}); get it by other means and put it at {path}") from None
    check(data, URL)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, data)


def check(data: bytes, source: str) -> None:
    digest = hashlib.sha256(data).hexdigest()
    if (len(data), digest) != (NUM_BYTES, SHA256):
        raise UserError(
            f"{source} is not the published file of Inception weights: {len(data):,} bytes, SHA-256 {digest}; "
            f"expected {NUM_BYTES:,} bytes, {SHA256}"
        )
