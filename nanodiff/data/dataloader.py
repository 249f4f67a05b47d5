"""Which images a rank trains on, and when: a deterministic stream, read ahead by a thread."""

import queue
import threading
import time

import numpy as np
import torch

from nanodiff.common import UserError


def to_model_range(images: torch.Tensor, flip: torch.Tensor | None = None) -> torch.Tensor:
    """uint8 (N, C, H, W) -> float32 in [-1, 1], on the same device; mirrored left-right where `flip` (N,) is True."""
    x = images.float() / 127.5 - 1
    return x if flip is None else torch.where(flip.to(x.device)[:, None, None, None], x.flip(3), x)


def to_uint8(x: torch.Tensor) -> torch.Tensor:
    """The inverse of to_model_range: [-1, 1] -> uint8, rounded to the nearest and clamped."""
    return ((x.float() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)


class DataLoader:
    """`images, labels = next(loader)`: (B, C, H, W) uint8 and (B,) int64 on `device`, B = device_batch_size.

    Position p of the stream is image perm[p % n] of epoch p // n, perm being a function of (seed, epoch) alone. Step s
    takes positions [s*total_batch_size, (s+1)*total_batch_size); of these, rank r at micro-step m takes the B from
    (m*world + r)*B. So what a step trains on depends neither on `world` nor on B, and starting at any step costs one
    permutation. `.data_wait` is how many seconds the last next() waited for data.
    Raises UserError where the batch sizes do not divide or ranks outnumber images.
    """

    def __init__(self, dataset, device_batch_size, total_batch_size, rank, world, seed, start_step=0, device="cpu",
                 prefetch=4):  # fmt: skip
        if device_batch_size < 1 or total_batch_size < 1 or total_batch_size % (device_batch_size * world):
            raise UserError(
                f"total_batch_size={total_batch_size} is not accepted; accepted: multiples of device_batch_size * ranks"
                f" = {device_batch_size} * {world} = {device_batch_size * world}"
            )
        if world > len(dataset):
            raise UserError(f"more ranks ({world}) than images ({len(dataset)}) in the data set")
        self.dataset, self.seed, self.device = dataset, seed, torch.device(device)
        self.device_batch_size, self.total_batch_size, self.rank, self.world = (
            device_batch_size, total_batch_size, rank, world,
        )  # fmt: skip
        self.data_wait = 0.0
        self._perm = (-1, np.empty(0, np.int64))  # the last epoch asked for, and its permutation
        self._queue, self._stop = queue.Queue(prefetch), threading.Event()
        self._thread = threading.Thread(target=self._work, args=(start_step,), daemon=True, name="dataloader")
        self._thread.start()

    def __iter__(self):
        return self

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        assert not self._stop.is_set(), "the loader is closed"
        start = time.perf_counter()
        item = self._queue.get()
        self.data_wait = time.perf_counter() - start
        if isinstance(item, BaseException):
            self._queue.put(item)  # every later call raises it, too
            raise item
        # On CUDA the copy runs beside the computation, because the thread has put the batch into pinned memory.
        return tuple(tensor.to(self.device, non_blocking=self.device.type == "cuda") for tensor in item)

    def close(self) -> None:
        """Stop the thread and wait for its end; the loader gives nothing more."""
        self._stop.set()
        self._thread.join()

    def indices(self, step: int, micro_step: int) -> np.ndarray:
        """(B,) the images of this rank at a micro-step of an optimisation step."""
        first = step * self.total_batch_size + (micro_step * self.world + self.rank) * self.device_batch_size
        epochs, offsets = np.divmod(np.arange(first, first + self.device_batch_size), len(self.dataset))
        return np.concatenate([self._permutation(e)[offsets[epochs == e]] for e in np.unique(epochs)])

    def _permutation(self, epoch: int) -> np.ndarray:
        cached = self._perm
        if cached[0] != epoch:
            rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([self.seed % 2**64, int(epoch)])))
            cached = self._perm = (epoch, rng.permutation(len(self.dataset)))
        return cached[1]

    def _work(self, step: int) -> None:
        try:
            while True:
                for micro_step in range(self.total_batch_size // (self.device_batch_size * self.world)):
                    indices = self.indices(step, micro_step)
                    arrays = self.dataset.images(indices), self.dataset.labels(indices)
                    item = tuple(torch.from_numpy(array) for array in arrays)
                    if self.device.type == "cuda":
                        item = tuple(tensor.pin_memory() for tensor in item)
                    if not self._put(item):
                        return
                step += 1
        except BaseException as error:
            self._put(error)

    def _put(self, item) -> bool:
        """Queue it, waiting for room; False if the loader was closed meanwhile."""
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=0.1)
                return True
            except queue.Full:
                pass
        return False
