"""The stream is a function of (seed, position): whatever the ranks, the micro-batches and the step to start from."""

import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanodiff.data.dataloader import AHEAD, DataLoader, shuffled


class Memory:
    """`counts` images of as many shapes; each shows its own index."""

    def __init__(self, *counts):
        self.buckets = {}
        start = 0
        for k, n in enumerate(counts):
            self.buckets[2, 2 * k + 2] = range(start, start + n)
            start += n

    def __len__(self):
        return sum(len(bucket) for bucket in self.buckets.values())

    def images(self, indices):
        (size,) = {size for size, bucket in self.buckets.items() if any(i in bucket for i in indices)}  # only one
        numbers = np.asarray(indices, np.int64)[:, None, None, None]
        return np.broadcast_to(numbers, (len(indices), 1, *size)).copy()

    def rows(self, indices):
        vectors = np.stack([indices, -indices], 1).astype(np.float16)
        return self.images(indices), {"y": np.asarray(indices), "vectors": vectors}


def take(counts, steps, batch, total, world=1, seed=0, start_step=0):
    """The images of each step, in the order of the whole batch."""
    taken = []
    loaders = [DataLoader(Memory(*counts), batch, total, rank, world, seed, start_step) for rank in range(world)]
    for _ in range(steps):
        taken.append([])
        for _ in range(total // (batch * world)):
            for loader in loaders:
                images, cond = next(loader)
                labels = cond["y"]
                assert labels.dtype == torch.int64
                assert (images.flatten(1) == labels[:, None]).all()
                assert cond["vectors"].tolist() == [[i, -i] for i in labels.tolist()]
                taken[-1] += labels.tolist()
    for loader in loaders:
        loader.close()
    return taken


BUCKETS = (50, 7, 24, 3)


@pytest.mark.parametrize(
    "counts",
    [
        (5,),  # smaller than a step
        (24,),
        (1000,),
        BUCKETS,
    ],
)
@pytest.mark.parametrize(
    ("world", "batch"),
    [
        (1, 3),
        (2, 6),
        (3, 8),
        (4, 1),
    ],
)
def test_a_step_does_not_depend_on_ranks_and_micro_batches(counts, world, batch):
    assert take(counts, 12, batch, 24, world, seed=7) == take(counts, 12, 12, 24, seed=7)


def test_starting_at_a_step_is_as_having_run_to_it():
    whole = take([30], 7, 4, 8)
    assert take([30], 3, 4, 8, start_step=4) == whole[4:]
    whole = take(BUCKETS, 36, 8, 8)
    assert take(BUCKETS, 5, 8, 8, start_step=31) == whole[31:]
    far = 10**9
    _, second = take(BUCKETS, 2, 8, 8, start_step=far)
    assert [second] == take(BUCKETS, 1, 8, 8, start_step=far + 1)


def test_a_step_can_be_read_again():
    loader = DataLoader(Memory(30), 4, 8, 0, 1, 0)
    images = [next(loader)[0] for _ in range(5)]
    loader.seek(1)
    assert torch.equal(next(loader)[0], images[2])
    loader.close()


def test_each_image_comes_once_in_an_epoch_but_for_the_batch_carried_over():
    data = Memory(*BUCKETS)
    total = 8
    taken = take(BUCKETS, 84 * 3, total, total)  # 24 epochs, after which all comes out even
    seen = np.bincount(np.concatenate(taken), minlength=len(data))
    assert (seen == 24).all()
    for epoch in range(1, 24):
        seen = np.bincount(np.concatenate(taken[: epoch * len(data) // total]), minlength=len(data))
        for bucket in data.buckets.values():
            part = seen[bucket.start : bucket.stop]
            assert part.max() - part.min() <= 1  # never a second time before all had their turn
            assert abs(part.sum() - epoch * len(bucket)) <= total * len(BUCKETS)
    first = taken[:84]
    second = taken[84:168]
    large = take(BUCKETS, 84, total, total, seed=2**70)
    assert first != second
    assert second != large
    ends = [bucket.stop for bucket in data.buckets.values()]
    order = np.searchsorted(ends, [step[0] for step in taken], side="right")
    assert len(np.unique(order[:80].reshape(8, 10), axis=0)) > 1  # the buckets are shuffled


@given(num=st.integers(1, 3000), key=st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**40)))
@settings(max_examples=30, deadline=None)
def test_an_order_is_a_bijection_whose_positions_need_not_be_asked_together(num, key):
    order = shuffled(np.arange(num), num, key)
    assert sorted(order) == list(range(num))
    for p in range(0, num, 97):
        assert shuffled(np.array([p]), num, key) == [order[p]]
    billion = 10**9 + num
    assert shuffled(np.arange(billion - 9, billion), billion, key).min() >= 0


@pytest.mark.parametrize("num", [2, 3, 8, 17])
def test_over_keys_every_image_and_pair_is_equally_frequent_everywhere(num):
    """Chi-square of (position, image), and of the images of the first two positions."""
    keys = 2500
    orders = np.array([shuffled(np.arange(num), num, (seed, seed % 5, 0)) for seed in range(keys)])
    single = np.stack([np.bincount(orders[:, p], minlength=num) for p in range(num)])
    pairs = np.bincount(orders[:, 0] * num + orders[:, 1], minlength=num**2)
    pairs = pairs[~np.eye(num, dtype=bool).ravel()]
    for counts, freedom in (
        (single, (num - 1) ** 2),
        (pairs, num * (num - 1) - 1),
    ):
        expected = counts.sum() / counts.size
        statistic = ((counts - expected) ** 2 / expected).sum()
        assert statistic < freedom + 4 * (2 * freedom) ** 0.5 + 10


def test_there_may_be_more_ranks_than_images():
    seen = set()
    for rank in range(8):
        loader = DataLoader(Memory(5), 1, 8, rank, 8, 0)
        seen |= {*loader.indices(0, 0).tolist()}
        loader.close()
    assert seen == set(range(5))


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
    images = data.images
    data.images = lambda indices: reads.append(1) or images(indices)
    before = threading.active_count()
    loader = DataLoader(data, 2, 2, 0, 1, 0)
    next(loader)
    assert loader.data_wait >= 0
    time.sleep(0.3)  # it would run away in this time
    assert 1 <= len(reads) <= 1 + AHEAD + 1  # taken, queued, in hand
    loader.close()
    loader.close()
    assert threading.active_count() == before
