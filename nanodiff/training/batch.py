"""Divide a step's images among ranks and micro-steps, as many at a time as fit into memory."""

import torch
import torch.distributed as dist

from nanodiff.common import UserError, is_out_of_memory
from nanodiff.conditions import some_conditions
from nanodiff.diffusion.timesteps import uniform
from nanodiff.dist import over_ranks

# Fraction of a GPU's memory that the search may take; the rest is for the exchange of gradients and the optimizer
MEMORY_TRIED = 0.95


def cut_batch(total_batch_size: int, device_batch_size: int, world: int) -> tuple[int, int]:
    """(images per forward pass of one rank, at most its share of the step; number of micro-steps)."""
    device_batch_size = min(device_batch_size, max(total_batch_size // world, 1))
    at_once = device_batch_size * world
    if total_batch_size % at_once:
        raise UserError(
            f"total_batch_size={total_batch_size} is not a multiple of "
            f"device_batch_size x ranks = {device_batch_size} x {world}"
        )
    return device_batch_size, total_batch_size // at_once


def memory_line(model, optim, ema, images: int) -> str:
    """A line that estimates a rank's memory in GiB.

    A compiled DiT in bf16 has 39 bytes of activations per token, channel and block, measured on an H100 (d12, d24).
    """
    config = model.config
    contents = "weights, gradients, optimizer and averages"
    counts = [p.numel() * (1 + p.requires_grad) for p in model.parameters()]
    counts += [x.numel() for buffer in optim.buffers for x in buffer.state.values()]
    counts += [x.numel() for average in ema.averages.values() for x in average]
    if hasattr(config, "width") and not config.checkpointing:
        contents += ", and activations"
        counts.append(39 * images * config.num_tokens * config.width * config.depth // 4)
    return f"memory, estimated: {4 * sum(counts) / 2**30:.1f} GiB: {contents}"


def automatic_batch(model, process, shape: tuple, autocast, share: int) -> int:
    """Images per forward pass for a rank's `share` of the step: on CUDA as many as fit, elsewhere up to 64."""
    sizes = [n for n in range(1, share + 1) if share % n == 0] or [1]
    if next(model.parameters()).device.type != "cuda":
        return max(n for n in sizes if n <= 64)
    torch.cuda.set_per_process_memory_fraction(MEMORY_TRIED)
    largest = largest_batch(model, process, shape, autocast, sizes)
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.reset_peak_memory_stats()  # the run reports its own peak
    return largest


def largest_batch(model, process, shape: tuple, autocast, sizes: list[int]) -> int:
    """A collective: the largest of the ascending `sizes` that fits into memory on every rank.

    Tries forward and backward passes of the uncompiled model, once optimizer and averages have their memory: this takes
    as long as two to four steps. The compiled model may fit twice as many images (d12 on 80 GB: 512, found 256), but
    compiling for each size would take half a minute.
    """
    device = next(model.parameters()).device

    def try_batch(n):
        x0 = torch.randn(n, *shape, device=device)
        cond = some_conditions(model.config, n, device)
        t, _ = uniform(torch.rand(n, device=device), process)
        with autocast:
            loss = process.losses(model, x0, t, x0, cond)["loss"]
        loss.mean().backward()

    fits = 0
    for n in sizes:
        try:
            try_batch(n)
            fits = n
        except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
            if not is_out_of_memory(error):
                raise
        # Not in the except block: there the error's frames keep their tensors alive
        model.zero_grad()
        if fits < n:
            break
    fits = int(over_ranks(fits, dist.ReduceOp.MIN, "the agreement on device_batch_size"))
    if fits == 0:
        raise UserError("not even one image at a time fits into memory: lower depth, or give --checkpointing")
    return fits
