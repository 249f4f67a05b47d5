"""The stream is a function of (seed, position): whatever the ranks, the micro-batches and the step to start from."""

import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanodiff.common import UserError
from nanodiff.data.dataloader import DataLoader


class Memory:
    """n images, each of which shows its own index."""

    def __init__(self, n):
        self.n = n
        self.buckets = {(2, 2): range(n)}

    def __len__(self):
        return self.n

    def images(self, indices):
        return np.asarray(indices, ">i4").view(np.uint8).reshape(-1, 1, 2, 2)

    def vectors(self, indices):
        return np.stack([indices, -indices], 1).astype(np.float32)

    def labels(self, indices):
        return np.asarray(indices) % 10


def shown(images):
    return images.numpy().reshape(-1, 4).copy().view(">i4").ravel().tolist()


def take(n, steps, device_batch_size, total, world=1, seed=0, start_step=0):
    """The images of each step: {(rank, micro-step): indices} put together in the order of their rows."""
    out = []
    loaders = [DataLoader(Memory(n), device_batch_size, total, r, world, seed, start_step) for r in range(world)]
    for _ in range(steps):
        rows = []
        for _ in range(total // (device_batch_size * world)):
            for loader in loaders:
                images, labels, vectors = next(loader)
                assert vectors.tolist() == [[i, -i] for i in shown(images)]
                assert images.dtype == torch.uint8 and labels.dtype == torch.int64
                assert labels.tolist() == [i % 10 for i in shown(images)]
                rows += shown(images)
        out.append(rows)
    for loader in loaders:
        loader.close()
    return out


@given(n=st.integers(4, 50), seed=st.integers(-3, 2**70))
@settings(max_examples=15, deadline=None)
def test_every_epoch_is_another_permutation(n, seed):
    stream = np.concatenate(take(n, 3 * n, 1, 1, seed=seed))
    epochs = stream.reshape(3, n).tolist()
    assert all(sorted(epoch) == list(range(n)) for epoch in epochs)
    assert n < 8 or epochs[0] != epochs[1] != epochs[2]
    assert n < 8 or epochs[0] != np.concatenate(take(n, n, 1, 1, seed=seed + 1)).tolist()


@pytest.mark.parametrize("n", [5, 24, 1000])  # smaller than a step, equal, larger
@pytest.mark.parametrize(("world", "device_batch_size"), [(1, 24), (1, 3), (2, 6), (3, 8), (4, 1)])
def test_a_step_does_not_depend_on_ranks_and_micro_batches(n, world, device_batch_size):
    assert take(n, 3, device_batch_size, 24, world, seed=7) == take(n, 3, 12, 24, seed=7)


def test_starting_at_a_step_is_as_having_run_to_it():
    assert take(30, 3, 4, 8, start_step=4) == take(30, 7, 4, 8)[4:]
    first = 1_000_003 * 8  # far away: by the definition of the stream
    epochs = {e: np.random.default_rng([0, e]).permutation(30) for e in {first // 30, (first + 7) // 30}}
    assert take(30, 1, 4, 8, start_step=1_000_003) == [[epochs[p // 30][p % 30] for p in range(first, first + 8)]]


def test_only_the_epoch_in_use_is_ever_permuted(monkeypatch):
    seeds, original = [], np.random.SeedSequence
    monkeypatch.setattr(np.random, "SeedSequence", lambda key: seeds.append(key[1]) or original(key))
    loader = DataLoader(Memory(100), 10, 10, 0, 1, 0, start_step=5000, prefetch=1)
    next(loader)
    loader.close()
    assert seeds == [500]


def test_more_ranks_than_images_are_refused():
    with pytest.raises(UserError, match="more ranks"):
        DataLoader(Memory(5), 1, 8, 0, 8, 0)


def test_an_error_while_reading_reaches_the_caller_again_and_again():
    data = Memory(10)
    data.images = lambda indices: 1 / 0
    loader = DataLoader(data, 2, 2, 0, 1, 0)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            next(loader)
    loader.close()


def test_close_ends_the_thread_and_reading_ahead_is_bounded():
    reads = []
    data = Memory(10)
    data.labels = lambda indices: reads.append(1) or np.asarray(indices)
    before = threading.active_count()
    loader = DataLoader(data, 2, 2, 0, 1, 0, prefetch=3)
    next(loader)
    assert loader.data_wait >= 0
    loader._thread.join(0.3)  # it would run away in this time
    assert len(reads) <= 1 + 3 + 1  # taken, queued, in hand
    loader.close()
    loader.close()
    assert threading.active_count() == before
