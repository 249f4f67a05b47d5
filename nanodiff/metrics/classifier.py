"""A small classifier, trained on a labelled set in seconds to minutes.

It judges samples: do they show the requested classes, and how far are their features from those of real images?
"""

import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanodiff.common import Progress, Tensors, UserError, is_first_rank, make_generator, print0
from nanodiff.data.dataset import SHAPES
from nanodiff.device import choose_dtype, host_copy
from nanodiff.dist import from_first_rank
from nanodiff.files import reading, sha256_of
from nanodiff.metrics.cache import cached
from nanodiff.metrics.network import Network
from nanodiff.safetensors import load_safetensors

VERSION = 1  # bump when the network or its training changes: cached classifiers are then retrained
MAX_RESOLUTION = 32  # larger images are averaged down to this
MAX_IMAGES = 50_000  # of a larger set, a random choice is used
MIN_TRAINED = 2000  # fewest images seen in training; a small set is repeated


class Classifier(Network):
    """Residual network: images (N, C, H, W) uint8 of any size -> features (N, F) and logits (N, K).

    Without classes (trained without labels), it returns the features as logits.
    """

    name = "classifier"
    batch_size = 1024

    def __init__(self, channels: int, resolution: int, num_classes: int, width: int = 32):
        super().__init__()
        self.channels = channels
        self.resolution = min(resolution, MAX_RESOLUTION)
        stride = 2 if self.resolution > 16 else 1  # the costly layers work on 16 x 16 at most
        self.trunk = nn.Sequential(
            conv_bn_relu(channels, width, stride),  # (N, w, 16, 16)
            conv_bn_relu(width, 2 * width),
            nn.MaxPool2d(2),  # (N, 2w, 8, 8)
            Residual(2 * width),
            conv_bn_relu(2 * width, 4 * width),
            nn.MaxPool2d(2),  # (N, 4w, 4, 4)
            Residual(4 * width),
        )
        self.num_features = 8 * width
        self.num_classes = num_classes
        self.head = nn.Linear(self.num_features, num_classes) if num_classes else nn.Identity()
        self.register_buffer("accuracy", torch.zeros(()))  # on held-out real images

    @property
    def title(self) -> str:
        if not self.num_classes:
            return f"{self.name}, trained without labels"
        return f"{self.name}, {self.accuracy:.2%} right on held-out images"

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        if self.channels == 1:  # grey images may come as RGB
            images = images.float().mean(1, keepdim=True)
        images = shrink(images, self.resolution)
        images = images.expand(-1, self.channels, -1, -1)  # grey images for an RGB judge
        features = self.pooled(images / 127.5 - 1)
        return features, self.head(features)

    def pooled(self, x: Tensor) -> Tensor:
        """x (N, C, r, r) in [-1, 1] -> features (N, F)."""
        h = self.trunk(x.contiguous(memory_format=torch.channels_last))  # (N, 4w, 4, 4)
        return torch.cat([h.mean((2, 3)), h.amax((2, 3))], 1)


class Residual(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.body = nn.Sequential(
            conv_bn_relu(width, width),
            conv_bn_relu(width, width),
        )

    def forward(self, x):
        return x + self.body(x)


def conv_bn_relu(n_in: int, n_out: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(n_in, n_out, 3, stride, padding=1, bias=False),
        nn.BatchNorm2d(n_out),
        nn.ReLU(inplace=True),
    )


def shrink(images: Tensor, resolution: int) -> Tensor:
    """Average uint8 images down to resolution x resolution pixels; smaller squares stay as they are."""
    if images.shape[-2] == images.shape[-1] <= resolution:
        return images
    return F.adaptive_avg_pool2d(images.float(), resolution).round().to(torch.uint8)


def shift(images: Tensor, generator: torch.Generator) -> Tensor:
    """Move each image by up to 1/8 of its size, repeating the edges."""
    n, _, h, w = images.shape
    most = h // 8
    canvas = F.pad(images.float(), [most] * 4, mode="replicate")
    windows = canvas.unfold(2, h, 1).unfold(3, w, 1)  # (N, C, 2 most + 1, 2 most + 1, H, W), a view
    rows, cols = torch.randint(2 * most + 1, (2, n), generator=generator)
    return windows[torch.arange(n), :, rows, cols]


def train_classifier(train, val, device) -> Classifier:
    """Train on `train` for 3 epochs (1 on the shapes), then measure the accuracy on `val`."""
    if train.num_classes < 2:
        raise UserError(f"a classifier needs labels of 2 or more classes, this data set has {train.num_classes}")
    device = torch.device(device)
    classifier = initialise(Classifier(train.channels, train.resolution, train.num_classes))
    classifier.to(device, memory_format=torch.channels_last)

    images, labels = (x.to(device) for x in load_images(train, classifier.resolution))
    num_images = len(images)
    epochs = 1 if train.name in SHAPES else 3
    batch_size = min(num_images, 250, max(num_images // 80, 16))
    steps_per_epoch = num_images // batch_size
    num_steps = math.ceil(max(epochs * num_images, MIN_TRAINED) / batch_size)
    optimizer = torch.optim.AdamW(classifier.parameters(), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, num_steps, pct_start=0.2)
    bf16 = choose_dtype("auto", device) == torch.bfloat16
    with Progress(num_steps * batch_size, "images", "training a classifier") as bar:
        for step in range(num_steps):
            if step % steps_per_epoch == 0:
                generator = make_generator(0, step)
                batches = torch.randperm(num_images, generator=generator).split(batch_size)
            rows = batches[step % steps_per_epoch]
            with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
                _, logits = classifier(shift(images[rows], generator))
            F.cross_entropy(logits.float(), labels[rows], label_smoothing=0.1).backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            bar.update(batch_size)

    images, labels = load_images(val, classifier.resolution)
    _, logits = classifier.eval().features(images)
    is_right = logits.argmax(1) == labels
    classifier.accuracy.fill_(is_right.float().mean())
    return classifier


def initialise(classifier: Classifier, seed: int = 0) -> Classifier:
    """He's normal initialisation (arXiv:1502.01852), a function of the seed; the head starts at 0."""
    generator = torch.Generator().manual_seed(seed)
    for p in classifier.trunk.parameters():
        if p.ndim == 4:  # a kernel
            nn.init.kaiming_normal_(p, generator=generator)
    for p in classifier.head.parameters():
        nn.init.zeros_(p)
    return classifier


def load_images(dataset, resolution: int, seed: int = 0):
    """Up to MAX_IMAGES of a set, chosen by the seed -> (n, C, r, r) uint8 with r <= resolution, (n,) int64."""
    order = torch.randperm(len(dataset), generator=make_generator(seed))
    indices = np.sort(order[:MAX_IMAGES])
    parts = []
    for rows in dataset.batches(indices, 1000):
        images = torch.as_tensor(dataset.images(rows))
        parts.append(shrink(images, resolution))
    return torch.cat(parts), torch.as_tensor(dataset.labels(indices))


def with_weights(tensors: Tensors, resolution: int, device) -> Classifier:
    """A classifier with the weights of a state dict, for images of `resolution`."""
    num_classes = len(tensors.get("head.bias", ()))
    classifier = Classifier(tensors["trunk.0.0.weight"].shape[1], resolution, num_classes)
    classifier.load_state_dict(tensors, strict=False)  # a file is without batch normalisation's counters
    return classifier.to(device, memory_format=torch.channels_last).eval()


def load_classifier(path: Path, device) -> Classifier:
    """The classifier in a .safetensors, as in runs/records; its `name` has the first digits of the file's SHA-256."""
    tensors, metadata = load_safetensors(path)
    with reading(path, "holds no classifier"):
        classifier = with_weights(tensors, int(metadata["resolution"]), device)
    classifier.name = f"judge_{sha256_of(path)[:12]}"
    return classifier


def get_classifier(train, val, device) -> Classifier:
    """The classifier for these splits, trained once by the first rank and cached beside them. Called by all ranks."""

    def compute():
        if not is_first_rank():
            return None
        print0(f"training a classifier on {train.path.name!r}, once, to judge samples ({len(train):,} images)")
        return host_copy(train_classifier(train, val, device).state_dict())

    path = train.path / "classifier.npz"
    weights = cached(path, [train, val], [f"{VERSION} {train.num_classes}".encode()], compute)
    return with_weights(from_first_rank(weights, "the classifier"), train.resolution, device)
