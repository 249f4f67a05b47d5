"""What runs/ holds: presets that the scripts know, stories that measure what they trained, captions that are true."""

import ast
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from conftest import ROOT, script_settings

from nanodiff.conditions import DataInfo
from nanodiff.data.dataset import open_dataset
from nanodiff.diffusion.process import make_process
from nanodiff.models.build import empty_model, make_model_config
from nanodiff.training.settings import refuse_useless
from runs.gpu.figures import note
from runs.words.captions import WORDS, caption, draw_captioned, one_hot_words, recognise

RUNS = ROOT / "runs"
IMAGES = DataInfo(kind="images", channels=3, resolution=32, num_classes=10, class_names=[*"0123456789"])
THOUSAND = dict(num_classes=1000, class_names=[*map(str, range(1000))])
LATENTS = DataInfo(kind="latents", channels=4, resolution=32, **THOUSAND)
# In place of Python: writes down how it was called, and leaves a checkpoint where one was trained
FAKE = r"""#!/bin/bash
echo "$*" >> "$CALLS"
[[ $* =~ base_train.*--model_tag=([a-z_0-9]+) ]] || exit 0
mkdir -p "$NANODIFF_BASE_DIR/runs/${BASH_REMATCH[1]}/checkpoints/step_000007"
"""
# For the GPU check: a GPU is there, figures.py and pytest are real, and a training neither ends nor heeds SIGTERM
FAKE_GPU = f"""#!/bin/bash
case $* in
    runs/gpu/figures.py*) exec {sys.executable} "$@" ;;
    *xdist*) exit 1 ;;
    *"-m pytest"*) exec {sys.executable} "${{@/tests\\/test_cuda.py/$CALLS.py}}" -c pyproject.toml ;;
    *base_train*) echo "$*" >> "$CALLS"; trap "" TERM; exec sleep 60 ;;
esac
"""
# timeout with a fortieth of the time, but for pytest
FAST = f"""#!/bin/bash
[[ $* != *"-m pytest"* ]] || exec {shutil.which("timeout")} "$@"
for word; do
    [[ $word =~ ^(--kill-after=)?([0-9]+)$ ]] && word=${{BASH_REMATCH[1]}}$((BASH_REMATCH[2] * 25))e-3
    words+=("$word")
done
exec {shutil.which("timeout")} "${{words[@]}}"
"""


@pytest.mark.parametrize("preset", sorted(path.name for path in RUNS.glob("*.py")))
def test_a_preset_is_accepted_and_says_what_it_is(preset):
    config = script_settings("base_train", str(RUNS / preset))
    assert config["model_tag"] == preset.removesuffix(".py")  # so that the run folder is where the docs say
    assert ast.get_docstring(ast.parse((RUNS / preset).read_text()))
    data = LATENTS if config["data"].endswith("_latents") else IMAGES
    refuse_useless(config, data, ["y"], is_resumed=False)


@pytest.mark.parametrize(
    "preset, data, parameters",
    [
        ("dit_imagenet256.py", LATENTS, 675_129_632 - 256 * 1152),  # theirs counts the fixed table of positions
        ("iddpm_cifar10.py", IMAGES, 52_546_438),  # Nichol & Dhariwal 2021: 52.5 M
        ("iddpm_imagenet64.py", replace(IMAGES, resolution=64, **THOUSAND), 121_063_942),  # 120 M
    ],
)
def test_published_sizes(preset, data, parameters):
    config = script_settings("base_train", str(RUNS / preset))
    process = make_process(config, data)
    model = empty_model(make_model_config(config, data, process))
    assert sum(p.numel() for p in model.parameters()) == parameters


@pytest.mark.parametrize("story", "cpu cifar10 emoji few_steps finetune miniseries pairs record speedrun words".split())
def test_a_story_measures_the_run_that_it_trained(tmp_path, story):
    for program in ("python3", "npm"):
        (tmp_path / program).write_text(FAKE)
        (tmp_path / program).chmod(0o755)
    env = os.environ | {"CALLS": str(tmp_path / "calls"), "NANODIFF_BASE_DIR": str(tmp_path)}
    env |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "DEPTHS": "2"}
    before = {"record": ["cpu", "1"], "speedrun": ["images", "vae"]}.get(story, [])  # those of base_train come last
    given = "--model_tag=mine"
    done = subprocess.run(["bash", ROOT / "runs" / f"{story}.sh", *before, given], env=env, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert [*tmp_path.glob("runs/*/checkpoints/step_000007")]  # nothing cleans it away at the end
    calls = (tmp_path / "calls").read_text().splitlines()
    (trained,) = [i for i, line in enumerate(calls) if given in line]
    after = [line.replace(str(tmp_path), "") for line in calls[trained + 1 :]]
    assert any("mine" in line for line in after)
    defaults = {"miniseries": "mini_", "finetune": "with_cross ", "few_steps": "few_steps_cpu", "emoji": "emoji64 "}
    default = defaults.get(story, f"{story}_")
    for call in after:
        assert f"--model={default}" not in call
        if "measured_" in call:
            assert "/runs/mine/measured_step_000007.npz" in call


@pytest.mark.parametrize("command", ["record.sh gpu 1", "cifar10.sh", "speedrun.sh images vae"])
def test_a_story_for_gpus_does_not_start_on_a_cpu(tmp_path, command):
    (tmp_path / "python3").write_text(FAKE.replace("\n", '\n[[ $* != *"mps.is_available"* ]] || exit 1\n', 1))
    (tmp_path / "python3").chmod(0o755)
    env = os.environ | {"CALLS": str(tmp_path / "calls"), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        f"bash runs/{command}",
        shell=True,
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: there is no GPU here; ")
    assert "base_train" not in (tmp_path / "calls").read_text()


@pytest.fixture
def check_gpu(tmp_path):
    """Runs the GPU check with these settings; what it prints."""
    shutil.which("timeout") or pytest.skip("needs GNU's timeout")
    for name, text in (
        ("python3", FAKE_GPU),
        ("timeout", FAST),
    ):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CALLS": str(tmp_path / "calls")}
    command = ["env", f"OUT={tmp_path}", f"NANODIFF_BASE_DIR={tmp_path}", "bash", ROOT / "runs" / "gpu.sh"]

    def check(fds=(), **settings):
        done = subprocess.run(command, env=env | settings, stdout=subprocess.PIPE, text=True, pass_fds=fds)
        return done.stdout

    return check


def test_nothing_of_the_gpu_check_outlives_it(check_gpu, tmp_path):
    end, held = os.pipe()
    assert "failed: save" in check_gpu([held], STAGES="save", TOTAL="60")
    assert (tmp_path / "calls").exists()
    os.close(held)
    os.set_blocking(end, False)
    assert os.read(end, 1) == b""  # an error, if any process holds the other end


def test_the_gpu_check_counts_its_tests(check_gpu, tmp_path):
    (tmp_path / "calls.py").write_text("import pytest\n\n\n@pytest.mark.cuda\ndef test_one():\n    pass\n")
    assert "nothing failed" in check_gpu(STAGES="tests")
    assert "::test_one PASSED" in (tmp_path / "tests.log").read_text()
    assert '"passed": 1' in (tmp_path / "results.jsonl").read_text()


@pytest.mark.parametrize(
    "stage, code, text, failed",
    [
        ("d12", "0", "compiled code is right", False),
        ("d12", "0", "compiled code is wrong here\ncontinuing uncompiled: it stays wrong", True),
        ("d12", "124", "stopped by a signal", False),
        ("kinds", "124", "stopped by a signal", True),
    ],
)
def test_a_stage_of_the_gpu_check_has_failed(tmp_path, stage, code, text, failed):
    (tmp_path / f"{stage}.log").write_text(text)
    (tmp_path / "metrics.jsonl").write_text('{"train/dt_ms": 1, "train/images_per_sec": 2}\n')
    note(tmp_path, stage, code, "1", tmp_path)
    assert json.loads((tmp_path / "results.jsonl").read_text())["failed"] == failed


def test_the_gpu_check_tells_what_it_skipped(check_gpu, tmp_path):
    table = check_gpu(STAGES="d24 cifar10", TOTAL="1").split("an H100")[1]
    for stage in ("d24", "cifar10"):
        assert f"\nskipped: {stage}, " in table
        assert f'"{stage}", "skipped": ' in (tmp_path / "results.jsonl").read_text()
    assert "nothing failed" in table


def test_the_set_of_the_new_class_has_half_crosses(tmp_path, monkeypatch):
    monkeypatch.setenv("NANODIFF_BASE_DIR", str(tmp_path))
    program = (RUNS / "finetune.sh").read_text().split("<< 'EOF'\n")[1].split("EOF\n")[0]
    exec(program.replace("12_000", "64").replace("400", "64"), {})
    made = open_dataset("shapes_half_cross", "train")
    images, cond = made.rows(range(64))
    crosses = cond["y"] == made.meta["class_names"].index("cross")
    assert images.shape == (64, 3, 16, 16)
    assert 32 <= crosses.sum() <= 37


def test_every_caption_is_true_by_the_search_that_grades():
    seen, of_seen = draw_captioned(24, seed=3, unseen=False)
    unseen, of_unseen = draw_captioned(24, seed=3, unseen=True)
    found = recognise(np.concatenate([seen, unseen]))
    assert [caption(*one) for one in zip(*found)] == of_seen + of_unseen


def test_pairs_to_ask_for_are_never_in_training():
    pairs = []
    for unseen in (False, True):
        _, captions = draw_captioned(4000, seed=0, unseen=unseen)
        pairs.append({tuple(text.split(",")[0].split()[1:]) for text in captions})  # (colour, shape)
    seen, unseen = pairs
    assert len(seen) == 40
    assert len(unseen) == 8
    assert not seen & unseen  # 6 colours and 8 shapes


def test_words_are_one_hot_and_in_order():
    captions = ["small red circle, top left", "large cyan dots, centre"]
    vectors = one_hot_words(captions)
    for text, rows in zip(captions, vectors, strict=True):
        words = [WORDS[i] for i in rows[rows.any(1)].argmax(1)]
        assert words == text.replace(",", "").split()
    assert vectors.sum() == 9
    assert not vectors[1, 4].any()
