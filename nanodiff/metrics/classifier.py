"""A small classifier trained on a labelled image set itself: do samples show what their labels say, and (through its
features) how far is their distribution from that of the real images, with no download and in seconds."""

import hashlib
import io
import json
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

from nanodiff.common import Progress, UserError, collective, get_dist, make_generator, print0
from nanodiff.device import choose_dtype
from nanodiff.files import write_atomic

MAX_RESOLUTION = 32  # larger images are averaged down to this first, so that judging costs the same for every set
VERSION = 1  # of the network and its training: raise it when either changes, and kept judges are trained anew
MAX_IMAGES = 50_000  # images of the training set in use (a random choice of larger sets), so that they fit in memory


class Judge(nn.Module):
    """Residual convolutional classifier, (N, C, H, W) uint8 images of any size -> features and labels.

    `.accuracy` is that on the held-out real images: no set of samples can be expected to score higher.
    """

    name = "classifier"  # in the names of files

    def __init__(self, channels: int, resolution: int, num_classes: int, width: int = 32):
        super().__init__()
        w, self.config = width, dict(channels=channels, resolution=resolution, num_classes=num_classes, width=width)
        self.resolution = min(resolution, MAX_RESOLUTION)
        stride = 2 if self.resolution > 16 else 1  # the costly first layers work on 16 x 16 at most
        self.trunk = nn.Sequential(
            conv_bn_relu(channels, w, stride),  # (N, w, 16, 16)
            conv_bn_relu(w, 2 * w),
            nn.MaxPool2d(2),  # (N, 2w, 8, 8)
            Residual(2 * w),
            conv_bn_relu(2 * w, 4 * w),
            nn.MaxPool2d(2),  # (N, 4w, 4, 4)
            Residual(4 * w),
        )
        self.num_features = 8 * w
        self.head = nn.Linear(self.num_features, num_classes)
        self.register_buffer("measured_accuracy", torch.zeros(()))

    @property
    def accuracy(self) -> float:
        return float(self.measured_accuracy)

    @property
    def title(self) -> str:
        return f"classifier trained on the set, {self.accuracy:.2%} right on held-out images"

    def embed(self, images: torch.Tensor) -> torch.Tensor:
        """(N, C, H, W) uint8 on the judge's device -> (N, F) features; differentiable in the weights."""
        x = shrink(images, self.resolution).float() / 127.5 - 1
        h = self.trunk(x.contiguous(memory_format=torch.channels_last))
        return torch.cat([h.mean((2, 3)), h.amax((2, 3))], 1)  # (N, 8w): how much, and whether at all

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(images))

    @torch.no_grad()
    def features(self, images, batch_size: int = 1024) -> tuple[torch.Tensor, torch.Tensor]:
        """(N, C, H, W) uint8 images, tensor or array -> penultimate layer (N, F), logits (N, K), float32 on the CPU."""
        self.eval()
        images = torch.as_tensor(images)
        assert images.dtype == torch.uint8 and images.ndim == 4, (images.dtype, images.shape)
        device = self.head.weight.device
        with torch.autocast(device.type, enabled=False):
            features = [self.embed(batch.to(device)) for batch in images.split(batch_size)]
            logits = [self.head(x).float().cpu() for x in features]
        return torch.cat([x.float().cpu() for x in features]), torch.cat(logits)

    def predict(self, images) -> torch.Tensor:
        """Most likely labels of (N, C, H, W) uint8 images -> (N,) int64 on the CPU."""
        return self.features(images)[1].argmax(1)


class Residual(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.body = nn.Sequential(conv_bn_relu(width, width), conv_bn_relu(width, width))

    def forward(self, x):
        return x + self.body(x)


def conv_bn_relu(n_in: int, n_out: int, stride: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(n_in, n_out, 3, stride, padding=1, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(n_out), nn.ReLU(inplace=True))


def shrink(images: torch.Tensor, resolution: int) -> torch.Tensor:
    """Average uint8 images down to resolution x resolution pixels, still uint8; smaller ones are left alone."""
    if max(images.shape[-2:]) <= resolution:
        return images
    return F.adaptive_avg_pool2d(images.float(), resolution).round().to(torch.uint8)


def shift(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Move each image by up to 1/8 of its size, edges repeated. The one augmentation under which the label of any set
    survives (a mirrored digit is no digit)."""
    n, _, h, w = images.shape
    moves = torch.randint(-(h // 8), h // 8 + 1, (2, n, 1), generator=generator)
    rows = (torch.arange(h) + moves[0]).clamp(0, h - 1).to(images.device)  # (N, H)
    cols = (torch.arange(w) + moves[1]).clamp(0, w - 1).to(images.device)  # (N, W)
    index = torch.arange(n, device=images.device)[:, None, None]
    return images.permute(0, 2, 3, 1)[index, rows[:, :, None], cols[:, None, :]].permute(0, 3, 1, 2)


def train_judge(
    train, val, device, total_images: int = 0, batch_size: int = 250, lr: float = 0.01, seed: int = 0, width: int = 32
) -> Judge:
    """Train a Judge on the labelled set `train`, measure it on `val`. `total_images` seen; 0 = 3 epochs, or 60,000.

    AdamW, one-cycle learning rate, labels smoothed by 0.1, shifts as augmentation, bf16 autocast where it is native.
    A function of the data and the seed (up to the order of floating-point sums). Raises UserError for a set without
    labels, or of latents.
    """
    if train.num_classes < 2:
        raise UserError(f"a judge needs labels of 2 or more classes, this data set has {train.num_classes}")
    device = torch.device(device)
    init = torch.Generator().manual_seed(seed)
    judge = Judge(train.channels, train.resolution, train.num_classes, width)
    for module in judge.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, generator=init)
        elif isinstance(module, nn.Linear):
            nn.init.zeros_(module.weight), nn.init.zeros_(module.bias)
    judge = judge.to(device, memory_format=torch.channels_last).train()

    images, labels = load(train, judge.resolution, seed)
    images, labels = images.to(device), labels.to(device)
    batch_size = min(batch_size, len(images))
    total_images = total_images or max(3 * len(images), 60_000)
    steps, steps_per_epoch = -(-total_images // batch_size), len(images) // batch_size
    optimizer = torch.optim.AdamW(judge.parameters(), lr=lr, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, steps, pct_start=0.2)
    bf16 = choose_dtype("auto", device) == torch.bfloat16
    with Progress(steps * batch_size, "images", "training the judge") as bar:
        for step in range(steps):
            if step % steps_per_epoch == 0:
                generator = make_generator(seed, step)
                order = torch.randperm(len(images), generator=generator).to(device)
            rows = order[(step % steps_per_epoch) * batch_size :][:batch_size]
            with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
                logits = judge(shift(images[rows], generator))
            F.cross_entropy(logits.float(), labels[rows], label_smoothing=0.1).backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
            bar.update(batch_size)
    images, labels = load(val, judge.resolution, seed)
    judge.measured_accuracy.fill_((judge.predict(images) == labels).float().mean())
    return judge.requires_grad_(False).eval()


def load(dataset, resolution: int, seed: int, chunk: int = 1000):
    """Up to MAX_IMAGES images of a set, chosen by the seed -> (n, C, r, r) uint8 with r <= resolution, (n,) int64."""
    order = torch.arange(dataset.num_images)
    if len(order) > MAX_IMAGES:
        order = torch.randperm(len(order), generator=make_generator(seed))[:MAX_IMAGES].sort().values
    parts = []
    for rows in order.split(chunk):
        images = torch.as_tensor(dataset.images(rows.numpy()))
        if images.dtype != torch.uint8:
            raise UserError(f"a judge looks at images in uint8, this data set holds {images.dtype} (latents?)")
        parts.append(shrink(images, resolution))
    return torch.cat(parts), torch.as_tensor(dataset.labels(order.numpy()))


def get_judge(train, val, device, **settings) -> Judge:
    """The judge of a data set: read from judge.pt beside the set if it is there, else trained (once) and kept there.

    `train`, `val`: the two splits as open_dataset gives them; `settings` as train_judge takes them. judge.pt holds its
    own key, a hash of meta.json and the settings: after a change of either, or damage, it is trained anew. Called by
    all ranks; the first trains and the others receive. Raises UserError as train_judge does.
    """
    meta_json = (train.path / "meta.json").read_bytes(), (val.path / "meta.json").read_bytes()
    settings_json = json.dumps([VERSION, settings], sort_keys=True).encode()
    key = hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in (*meta_json, settings_json))).hexdigest()
    path, judge = train.path / "judge.pt", None
    if get_dist()[0] == 0:
        judge = read_judge(path, key, device)
        if judge is None:
            print0(f"training a judge of {train.path.name!r}, once ({train.num_images:,} images)")
            start = time.perf_counter()
            judge = train_judge(train, val, device, **settings)
            print0(f"its accuracy on held-out images is {judge.accuracy:.2%} ({time.perf_counter() - start:.0f} s)")
            save_judge(path, key, judge)
    if dist.is_initialized():
        shared = [None if judge is None else (judge.config, {k: v.cpu() for k, v in judge.state_dict().items()})]
        with collective("the broadcast of the judge"):
            dist.broadcast_object_list(shared, src=0)
        judge = judge or restore(*shared[0], device)
    return judge


def restore(config: dict, weights: dict, device) -> Judge:
    judge = Judge(**config).to(device, memory_format=torch.channels_last)
    judge.load_state_dict(weights)
    return judge.requires_grad_(False).eval()


def read_judge(path: Path, key: str, device) -> Judge | None:
    """The judge in the file, or None where the file is absent, of another key, or damaged."""
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
        return restore(saved["config"], saved["weights"], device) if saved["key"] == key else None
    except FileNotFoundError:
        return None
    except Exception as error:  # torch.load of a damaged file raises nearly anything
        print0(f"warning: {path} cannot be read and is made anew: {type(error).__name__}")
        return None


def save_judge(path: Path, key: str, judge: Judge) -> None:
    weights = {k: v.cpu().contiguous() for k, v in judge.state_dict().items()}
    file = io.BytesIO()
    torch.save({"key": key, "config": judge.config, "accuracy": judge.accuracy, "weights": weights}, file)
    try:
        write_atomic(path, file.getvalue())
    except OSError as error:  # a data set on a read-only disk: nothing is lost but the time of the next training
        print0(f"warning: the judge cannot be kept in {path}: {error.strerror}")
