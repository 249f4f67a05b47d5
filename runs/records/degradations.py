"""
Do the judges of CIFAR-10 rank damage? 5,000 validation images, damaged in known ways, against the training images:

    python3 runs/records/degradations.py fd_classifier        # or fd_simclr
"""

import io
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from nanodiff.common import in_batches
from nanodiff.data.dataset import open_dataset
from nanodiff.metrics.distances import frechet_distance, precision_recall
from nanodiff.metrics.features import collect_features, load_network, reference_features

metric = sys.argv[1]
N = 5000
generator = torch.Generator().manual_seed(0)


def blur(images, sigma):
    x = torch.arange(-6, 7)
    kernel = torch.exp(-(x**2) / (2 * sigma**2))
    kernel = (kernel / kernel.sum()).outer(kernel / kernel.sum()).expand(3, 1, 13, 13)
    return F.conv2d(F.pad(images.float(), (6,) * 4, mode="reflect"), kernel, groups=3)


def noise(images, deviation):
    return images + deviation * torch.randn(images.shape, generator=generator)


def jpeg(images, quality):
    out = []
    for image in images.permute(0, 2, 3, 1).numpy():
        file = io.BytesIO()
        Image.fromarray(image).save(file, "JPEG", quality=quality)
        out.append(np.asarray(Image.open(file)))
    return torch.from_numpy(np.stack(out)).permute(0, 3, 1, 2)


def grey(images, share):
    return images + share * (images.float().mean(1, keepdim=True) - images)


def blocks(images, number):
    """Squares of 8 x 8 from another image at the same place."""
    out = images.clone()
    for i, other in enumerate(torch.randperm(len(images), generator=generator)):
        for top, left in torch.randint(0, 25, (number, 2), generator=generator):
            out[i, :, top : top + 8, left : left + 8] = images[other, :, top : top + 8, left : left + 8]
    return out


def classes(number):
    """Up to N images of the first `number` classes; 10 = all."""
    found = np.flatnonzero(labels < number)
    return everything[found[np.linspace(0, len(found) - 1, min(N, len(found))).astype(int)]]


val = open_dataset("cifar10", "val")
train = open_dataset("cifar10", "train")
everything = torch.from_numpy(val.images(np.arange(len(val))))
labels = np.asarray(val.labels(np.arange(len(val))))
images = everything[::2]  # every second one, as files may be sorted by class
damaged = {"none": lambda: images}
for sigma in (0.4, 0.7, 1.2):
    damaged[f"blur, sigma {sigma} pixels"] = lambda sigma=sigma: blur(images, sigma)
for deviation in (4, 8, 16):
    damaged[f"Gaussian noise, deviation {deviation} of 255"] = lambda deviation=deviation: noise(images, deviation)
for quality in (80, 50, 20):
    damaged[f"JPEG, quality {quality}"] = lambda quality=quality: jpeg(images, quality)
for share in (0.5, 1):
    damaged[f"{share:.0%} of the colour taken away"] = lambda share=share: grey(images, share)
for number in (1, 2, 4):
    damaged[f"{number} of 16 parts from another image"] = lambda number=number: blocks(images, number)
for number in (8, 5, 2):
    damaged[f"{number} of 10 classes" + " (2,000 images)" * (number == 2)] = lambda number=number: classes(number)

judge = "" if metric == "fd_simclr" else "runs/records/judge_cifar10.safetensors"
network = load_network(metric, "cifar10", "cpu", judge)
known = reference_features(train, network)
print(f"| damage | {metric} | precision | recall |")
print("|---|---|---|---|")
for name, damage in damaged.items():
    x = damage().float().round().clamp(0, 255).to(torch.uint8)
    found = collect_features(x.__getitem__, in_batches(np.arange(len(x)), 500), network)
    distance = frechet_distance(found.mu, found.sigma, known.mu, known.sigma)
    precision, recall = precision_recall(known.some[: len(x)], found.some)
    print(f"| {name} | {distance:.3f} | {precision:.3f} | {recall:.3f} |", flush=True)
