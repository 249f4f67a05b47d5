"""A latent set is the same however the work was cut up or interrupted, and holds what the autoencoder gives."""

import time

import pytest
from conftest import refused
from processes import Started, run_process
from tiny_runs import make_autoencoder, make_data

from nanodiff.data.dataset import open_dataset


@pytest.fixture
def vae(base):
    """200 training images, so that there are four shards of them and one for validation."""
    make_data(train=200, val=24)
    return make_autoencoder(base / "vae")


def cache(run_script, vae, name, *args):
    run_script("cache_latents", "--data=tiny", f"--autoencoder={vae}", f"--name={name}", "--device_type=cpu", *args)


def files(base, name):
    return {p.name: p.read_bytes() for p in (base / "data" / name).iterdir()}


@pytest.mark.slow
def test_killed_runs_and_two_ranks_make_the_same_set(base, vae, run_script):
    """kill -9 while shards are written, by one rank and by two; what goes on with another number ends the same."""
    cache(run_script, vae, "whole", "--batch_size=2")
    for name, ranks in (
        ("a", 1),
        ("b", 2),
    ):
        args = ("--data=tiny", f"--autoencoder={vae}", f"--name={name}", "--device_type=cpu", "--batch_size=2")
        running = Started("cache_latents", *args, ranks=ranks)
        parts = base / "data" / f".{name}.parts"
        while not list(parts.glob("notes/train_*.json")):
            assert not any(running.codes())
            time.sleep(0.002)
        running.kill()
        done = [f"{note.stem}.npy" for note in parts.glob("notes/*_*.json")]
        assert 1 <= len(done) < 5, "it was not killed in time"
        times = [(parts / shard).stat().st_mtime_ns for shard in done]
        run_process("cache_latents", *args, ranks=3 - ranks)
        assert files(base, name) == files(base, "whole")
        folder = base / "data" / name
        assert [(folder / shard).stat().st_mtime_ns for shard in done] == times  # none made again


def test_latents_of_latents_are_refused_and_a_set_is_replaced(vae, run_script):
    cache(run_script, vae, "whole")
    of_latents = ("cache_latents", "--data=whole", f"--autoencoder={vae}")
    refused("holds latents, 6 channels, sides of 4 px; accepted: images", run_script, *of_latents)
    with open(open_dataset("tiny").path / "train_images_000.npy", "r+b") as shard:
        shard.seek(-1, 2)
        shard.write(b"~")
    refused("train_images_000.npy is damaged", cache, run_script, vae, "other")
    make_data(train=200, val=24, overwrite=True)
    cache(run_script, vae, "whole", "--overwrite", "--flip")
    assert open_dataset("whole").channels == 12
