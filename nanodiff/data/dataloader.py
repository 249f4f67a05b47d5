"""Which images a rank trains on, and when: a deterministic stream, read ahead by a thread."""

import functools
import itertools
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nanodiff.common import Tensors

AHEAD = 4  # micro-batches that the thread reads ahead
ROUNDS = 8  # of shuffled(); with 3 or more, positions and pairs are as frequent as in random orders


def shuffled(positions: np.ndarray, num: int, key: tuple[int, ...]) -> np.ndarray:
    """The elements (n,) int64 at `positions` (n,) of a random order of 0..num-1, which is a function of `key`.

    A bijection without a table: a Feistel network permutes [0, 4^k), the smallest such range that holds num; each of
    its rounds swaps the halves of a number's bits and mixes one of them. Results >= num are permuted again.
    """
    bits = (num - 1).bit_length()
    half = (bits + 1) // 2
    low = 2**half - 1
    keys = np.random.SeedSequence(key).generate_state(ROUNDS, np.uint64)
    result = np.array(positions, np.uint64)
    rest = np.arange(len(result))
    while len(rest):
        upper = result[rest] >> half
        lower = result[rest] & low
        for k in keys:
            mix = (lower ^ k) * 0x9E3779B97F4A7C15
            mix = (mix ^ mix >> 32) * 0xD6E8FEB86659FD93
            upper, lower = lower, upper ^ (mix >> 32 & low)
        result[rest] = upper << half | lower
        rest = rest[result[rest] >= num]
    return result.astype(np.int64)


@functools.lru_cache(1)  # 70 ms per epoch of 1e8 images
def shuffled_buckets(num_batches: tuple[int, ...], key: tuple[int, ...]) -> np.ndarray:
    """The bucket that each batch of an epoch draws from, given the number of batches per bucket."""
    buckets = np.repeat(np.arange(len(num_batches)), num_batches)
    num = len(buckets)
    return buckets[shuffled(np.arange(num), num, key)]


@dataclass
class DataLoader:
    """`images, cond = next(loader)`: (B, C, H, W) and {name: (B, ...)}, as stored, on `device`; B = device_batch_size.

    Position p of the stream is image p % n of epoch p // n, shuffled by (seed, epoch) only. Step s takes
    total_batch_size positions from s*total_batch_size on; of these, rank r at micro-step m takes B from (m*world + r)*B
    on. So the images of a step depend neither on `world` nor on B, and any step can be the first.
    A set in buckets has one stream per bucket; each step draws from one of them: see `bucket`.
    `.data_wait`: seconds that the last next() waited.
    """

    dataset: object
    device_batch_size: int
    total_batch_size: int
    rank: int
    world: int
    seed: int
    start_step: int = 0
    device: str | torch.device = "cpu"

    def __post_init__(self):
        self.device = torch.device(self.device)
        self._micro_steps = self.total_batch_size // (self.device_batch_size * self.world)
        self._thread = ThreadPoolExecutor(1, "dataloader")
        self.seek(self.start_step)

    def seek(self, step: int) -> None:
        """Continue with the images of this step."""
        self._numbers = itertools.count(step * self._micro_steps)
        self._ahead = deque()
        for _ in range(AHEAD):
            self._read_ahead()

    def __next__(self) -> tuple[Tensor, Tensors]:
        start = time.perf_counter()
        rows = self._ahead[0].result()  # an error stays there, for later calls
        self.data_wait = time.perf_counter() - start
        self._ahead.popleft()
        self._read_ahead()
        # On CUDA the copy overlaps with computation, since the thread has pinned the memory.
        is_pinned = self.device.type == "cuda"
        rows = {name: x.to(self.device, non_blocking=is_pinned) for name, x in rows.items()}
        return rows.pop("images"), rows

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def indices(self, step: int, micro_step: int) -> np.ndarray:
        """(B,) indices of this rank's images at a micro-step."""
        number, step = self.bucket(step)
        bucket = list(self.dataset.buckets.values())[number]
        first_row = (micro_step * self.world + self.rank) * self.device_batch_size
        positions = step * self.total_batch_size + first_row + np.arange(self.device_batch_size)
        epochs, offsets = np.divmod(positions, len(bucket))
        parts = []
        for epoch in np.unique(epochs):
            key = (self.seed, epoch, number)
            parts.append(shuffled(offsets[epochs == epoch], len(bucket), key))
        return bucket.start + np.concatenate(parts)

    def bucket(self, step: int) -> tuple[int, int]:
        """Number of the bucket that step `step` draws from, and how many earlier steps drew from it.

        After e epochs a bucket of n images has filled e*n // total_batch_size batches; images left over wait for the
        next epoch. The order of an epoch's batches is a function of (seed, epoch).
        """
        counts = np.array([len(bucket) for bucket in self.dataset.buckets.values()])

        def batches(epochs):
            return epochs * counts // self.total_batch_size

        epoch = step * self.total_batch_size // len(self.dataset)  # or a later one, as left-overs delay batches
        while batches(epoch + 1).sum() <= step:
            epoch += 1
        past_batches = batches(epoch)
        num_batches = batches(epoch + 1) - past_batches
        order = shuffled_buckets(tuple(num_batches), (self.seed, epoch, len(counts)))
        place = step - past_batches.sum()  # among this epoch's batches
        number = order[place]
        count = past_batches[number] + np.count_nonzero(order[:place] == number)
        return number, count

    def _read_ahead(self) -> None:
        task = self._thread.submit(self._read, next(self._numbers))
        self._ahead.append(task)

    def _read(self, number: int) -> Tensors:
        """The thread's work: "images" and conditions of a micro-step on the CPU."""
        step, micro_step = divmod(number, self._micro_steps)
        images, rows = self.dataset.rows(self.indices(step, micro_step))
        rows["images"] = images
        tensors = {}
        for name, x in rows.items():
            tensor = torch.from_numpy(x)
            if self.device.type == "cuda":
                tensor = tensor.pin_memory()
            tensors[name] = tensor
        return tensors
