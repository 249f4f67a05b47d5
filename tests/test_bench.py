"""The bench measures what it says: candidates in turn, ratios to the reference of the same run."""

import json

import pytest
from conftest import run_process


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["dit_classic,dit", "unet"])
def test_bench_compares_with_the_published_recipe(arch):
    small = "--depth=1 --patch_size=8 --image_size=16 --num_res_blocks=1 --batch_size=2 --rounds=2 --steps=1".split()
    done = run_process("bench", *small, f"--archs={arch}", "--compile=False", "--dtype=float32", "--as_json")
    rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert len(rows) == 1 + len(arch.split(","))
    for row in rows:
        assert row["min_ms"] <= row["step_ms"] <= row["max_ms"] and row["memory_gb"] > 0.05
        assert row["ratio"] == pytest.approx(rows[0]["step_ms"] / row["step_ms"])
        assert row["images_per_sec"] == pytest.approx(2000 / row["step_ms"])
