"""The scripts in runs/ measure the run that they have trained, whatever it is called."""

import os
import subprocess

import pytest
from conftest import ROOT

# In place of Python: writes down how it was called, and leaves a checkpoint where one was trained
FAKE = r"""#!/bin/bash
echo "$*" >> "$CALLS"
[[ $* =~ base_train.*--model_tag=([a-z_0-9]+) ]] || exit 0
mkdir -p "$NANODIFF_BASE_DIR/runs/${BASH_REMATCH[1]}/checkpoints/step_000007"
"""
BEFORE = {"record": ["cpu", "1"], "speedrun": ["images", "vae"]}  # arguments before those of base_train


@pytest.mark.parametrize("story", "cpu cifar10 few_steps finetune miniseries pairs record speedrun words".split())
def test_a_story_measures_the_run_that_it_trained(tmp_path, story):
    (tmp_path / "python3").write_text(FAKE)
    (tmp_path / "python3").chmod(0o755)
    env = os.environ | {"CALLS": str(tmp_path / "calls"), "NANODIFF_BASE_DIR": str(tmp_path)}
    env |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "DEPTHS": "2"}
    before, given = BEFORE.get(story, []), "--model_tag=mine"
    done = subprocess.run(["bash", ROOT / "runs" / f"{story}.sh", *before, given], env=env, capture_output=True)
    assert done.returncode == 0, done.stderr
    calls = (tmp_path / "calls").read_text().splitlines()
    (trained,) = [i for i, call in enumerate(calls) if given in call]
    after = [call.replace(str(tmp_path), "") for call in calls[trained + 1 :]]
    assert any("mine" in call for call in after)
    default = {"miniseries": "mini_", "finetune": "with_cross ", "few_steps": "few_steps_cpu"}.get(story, f"{story}_")
    assert not any(f"--model={default}" in call for call in after)
    measured = [call for call in after if "measured_" in call]
    assert all("/runs/mine/measured_step_000007.npz" in call for call in measured)
