"""
Trains the second judge of CIFAR-10, runs/records/simclr_cifar10.safetensors, without labels: the classifier's network
learns by SimCLR (arXiv:2002.05709) to tell which two crops come from one of the 50,000 training images.

    python3 runs/records/train_simclr.py OUT.safetensors [--data=cifar10] [--epochs=12] [--seed=0]
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.nn as nn
import torch.nn.functional as F

from configurator import configure
from nanodiff.data.dataset import open_dataset
from nanodiff.device import choose_dtype
from nanodiff.metrics.classifier import Classifier, initialise, load_images
from nanodiff.safetensors import save_safetensors

data = "cifar10"  # prepared set
epochs = 12  # >= 1
seed = 0  # >= 0
batch_size = 256  # >= 2: images, two views each
lr = 0.003  # > 0: peak
temperature = 0.3  # > 0: of the softmax over the batch
log_every = 50  # >= 1: steps
out = Path(sys.argv[1])
configure(globals(), sys.argv[2:])


def views(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """(N, 3, H, W) uint8 -> a random crop, flipped, in other colours, each: (N, 3, H, W) in [-1, 1]."""
    n = len(images)

    def uniform(low, high, *shape):
        return low + (high - low) * torch.rand(n, *shape, generator=generator)

    # Crops of 25 to 100% of the area, 3:4 to 4:3, half of them flipped
    area = uniform(0.25, 1)
    ratio = uniform(-1, 1).mul(0.288).exp()
    width = (area * ratio).sqrt().clamp(max=1)
    height = (area / ratio).sqrt().clamp(max=1)
    theta = torch.zeros(n, 2, 3)
    theta[:, 0, 0] = width * (torch.rand(n, generator=generator) < 0.5).float().mul(2).sub(1)
    theta[:, 1, 1] = height
    theta[:, 0, 2] = (1 - width) * uniform(-1, 1)
    theta[:, 1, 2] = (1 - height) * uniform(-1, 1)
    x = images.float() / 127.5 - 1
    grid = F.affine_grid(theta, list(x.shape), align_corners=False)
    x = F.grid_sample(x, grid, padding_mode="reflection", align_corners=False)

    # Colours of 80% of the images: hue turned, saturation, contrast and brightness scaled; 20% are grey
    jittered = torch.rand(n, generator=generator) < 0.8
    grey = torch.rand(n, generator=generator) < 0.2
    angle = uniform(-0.6, 0.6)
    saturation = uniform(0.4, 1.6)
    angle[~jittered], saturation[~jittered] = 0, 1
    saturation[grey] = 0
    to_yiq = torch.tensor([[0.299, 0.587, 0.114], [0.596, -0.274, -0.322], [0.211, -0.523, 0.312]])
    turn = torch.zeros(n, 3, 3)
    turn[:, 0, 0] = 1
    turn[:, 1, 1] = turn[:, 2, 2] = saturation * angle.cos()
    turn[:, 2, 1] = saturation * angle.sin()
    turn[:, 1, 2] = -turn[:, 2, 1]
    x = torch.einsum("nij,njhw->nihw", to_yiq.inverse() @ turn @ to_yiq, x)
    contrast = uniform(0.6, 1.4, 1, 1, 1)
    brightness = uniform(-0.4, 0.4, 1, 1, 1)
    contrast[~jittered], brightness[~jittered] = 1, 0
    mean = x.mean((1, 2, 3), keepdim=True)
    return ((x - mean) * contrast + mean + brightness).clamp(-1, 1)


def nt_xent(z: torch.Tensor) -> torch.Tensor:
    """z (2N, D), row i and row N + i from one image: each must find the other among all (SimCLR, eq. 1)."""
    z = F.normalize(z, dim=1)
    similarity = z @ z.T / temperature
    similarity.fill_diagonal_(-1e4)  # none is its own neighbour
    n = len(z) // 2
    return F.cross_entropy(similarity, torch.arange(2 * n).roll(n))


dataset = open_dataset(data, "train")
images, _ = load_images(dataset, 32, seed)
judge = initialise(Classifier(dataset.channels, dataset.resolution, num_classes=0), seed).train()
torch.manual_seed(seed)
width = judge.num_features
projection = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 128))
both = nn.ModuleList([judge, projection]).to(memory_format=torch.channels_last)
decayed = [p for p in both.parameters() if p.ndim > 1 and p.numel()]
others = [p for p in both.parameters() if p.ndim <= 1 and p.numel()]
optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.05}, {"params": others, "weight_decay": 0}])
generator = torch.Generator().manual_seed(seed)
bf16 = choose_dtype("auto", torch.device("cpu")) == torch.bfloat16

start = time.monotonic()
num_steps = epochs * len(images) // batch_size
losses = []
order = torch.empty(0, dtype=torch.int64)
for step in range(num_steps):
    for group in optimizer.param_groups:
        group["lr"] = lr * min((step + 1) / 100, 1 - step / num_steps)
    if len(order) < batch_size:
        order = torch.randperm(len(images), generator=generator)
    rows, order = order[:batch_size], order[batch_size:]
    x = torch.cat([views(images[rows], generator), views(images[rows], generator)])
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        features = judge.pooled(x)
    loss = nt_xent(projection(features.float()))
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if (step + 1) % log_every == 0:
        mean = sum(losses[-log_every:]) / log_every
        minutes = (time.monotonic() - start) / 60
        print(f"step {step + 1:5d} of {num_steps}, {minutes:5.1f} minutes, loss {mean:.4f}", flush=True)

metadata = {"resolution": str(judge.resolution), "training": f"SimCLR on {data}, no labels", "seed": str(seed)}
metadata |= {"epochs": str(epochs), "steps": str(num_steps), "loss": f"{sum(losses[-100:]) / 100:.4f}"}
tensors = {name: tensor.half() for name, tensor in judge.state_dict().items() if tensor.is_floating_point()}
save_safetensors(tensors, out, metadata)
print(f"written to {out}: {metadata}")
