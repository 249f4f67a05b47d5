"""Which images a rank trains on, and when: a deterministic stream, read ahead by a thread."""

import contextlib
import functools
import itertools
import queue
import threading
import time

import numpy as np
import torch

from nanodiff.common import UserError


class DataLoader:
    """`images, labels, vectors = next(loader)`: (B, C, H, W) as stored, (B,) int64, and (B, D) or (B, L, D) fp32 or
    None; on `device`, B = device_batch_size.

    Position p of the stream is image perm[p % n] of epoch p // n; perm depends on (seed, epoch) only. Step s takes
    total_batch_size positions from s*total_batch_size on; of these, rank r at micro-step m takes B from (m*world + r)*B
    on. So the images of a step depend neither on `world` nor on B, and starting at any step costs one permutation.
    A set in buckets has one such stream per bucket, and a step takes its images from one of them: see `bucket`.
    `.data_wait`: seconds that the last next() waited.
    """

    def __init__(self, dataset, device_batch_size, total_batch_size, rank, world, seed, start_step=0, device="cpu",
                 prefetch=4):  # fmt: skip
        if world > len(dataset):
            raise UserError(f"more ranks ({world}) than images ({len(dataset)}) in the data set")
        self.dataset = dataset
        self.device_batch_size = device_batch_size
        self.total_batch_size = total_batch_size
        self.rank = rank
        self.world = world
        self.seed = seed
        self.device = torch.device(device)
        self.data_wait = 0.0
        self._permutation = functools.lru_cache(len(dataset.buckets) + 2)(self._permutation)
        self._queue = queue.Queue(prefetch)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, args=(start_step,), daemon=True, name="dataloader")
        self._thread.start()

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        assert not self._stop.is_set(), "the loader is closed"
        start = time.perf_counter()
        item = self._queue.get()
        self.data_wait = time.perf_counter() - start
        if isinstance(item, BaseException):
            self._queue.put(item)  # for later calls
            raise item
        # On CUDA the copy overlaps with computation, since the thread has pinned the memory.
        is_cuda = self.device.type == "cuda"
        return tuple(x if x is None else x.to(self.device, non_blocking=is_cuda) for x in item)

    def close(self) -> None:
        self._stop.set()
        while self._thread.is_alive():  # it may be waiting for room in the queue
            with contextlib.suppress(queue.Empty):
                self._queue.get(timeout=0.1)

    def indices(self, step: int, micro_step: int) -> np.ndarray:
        """(B,) the images of this rank at a micro-step."""
        number, step = self.bucket(step)
        bucket = list(self.dataset.buckets.values())[number]
        first_row = (micro_step * self.world + self.rank) * self.device_batch_size
        first = step * self.total_batch_size + first_row
        positions = np.arange(first, first + self.device_batch_size)
        epochs, offsets = np.divmod(positions, len(bucket))
        shuffled = []
        for epoch in np.unique(epochs):
            permutation = self._permutation(number, epoch, len(bucket))
            shuffled.append(permutation[offsets[epochs == epoch]])
        return bucket.start + np.concatenate(shuffled)

    def bucket(self, step: int) -> tuple[int, int]:
        """Number of the bucket that step `step` draws from, and how many earlier steps drew from it.

        A bucket of n images has given e*n // total_batch_size batches when epoch e begins: a partial batch carries over
        into the next. The order of an epoch's batches is a function of (seed, epoch).
        """
        counts = np.array([len(bucket) for bucket in self.dataset.buckets.values()])
        if len(counts) == 1:
            return 0, step
        epoch = step * self.total_batch_size // len(self.dataset)  # this one or, by carry-over, a later one
        while (done := (epoch + 1) * counts // self.total_batch_size).sum() <= step:
            epoch += 1
        before = epoch * counts // self.total_batch_size
        order = np.repeat(np.arange(len(counts)), done - before)
        order = order[self._permutation(len(counts), epoch, len(order))]
        place = step - before.sum()
        number = order[place]
        earlier = before[number] + np.sum(order[:place] == number)
        return int(number), int(earlier)

    def _permutation(self, bucket: int, epoch: int, num: int) -> np.ndarray:
        """Permutes `num` elements: a bucket's images or, past the last bucket, an epoch's batches."""
        entropy = np.random.SeedSequence([self.seed % 2**64, int(epoch), bucket])
        return np.random.Generator(np.random.PCG64(entropy)).permutation(num)

    def _read(self, indices: np.ndarray) -> list[torch.Tensor | None]:
        """Images, labels and vectors on the CPU."""
        data = self.dataset
        tensors = []
        for x in (data.images(indices), data.labels(indices), data.vectors(indices)):
            if x is not None:
                x = torch.from_numpy(x)
                if self.device.type == "cuda":
                    x = x.pin_memory()
            tensors.append(x)
        return tensors

    def _work(self, step: int) -> None:
        """The thread: fill the queue until close() or an error."""
        micro_steps = self.total_batch_size // (self.device_batch_size * self.world)
        try:
            for number in itertools.count(step * micro_steps):
                if self._stop.is_set():
                    return
                indices = self.indices(*divmod(number, micro_steps))
                self._queue.put(self._read(indices))
        except BaseException as error:
            self._queue.put(error)
