"""Steps against quality: the error of deterministic samplers vanishes with the steps, and the report shows it."""

import json

import pytest
from test_base_eval import newest, quick_classifier  # noqa: F401
from tiny_runs import TIMELESS, make_data, make_run

from nanodiff.common import UserError


def compared(run_script, run_dir, *args):
    run_script("compare_samplers", *TIMELESS, f"--run={run_dir}", "--error_images=3", *args)
    return json.loads(newest(run_dir, "eval_samplers_000001_*.json").read_text())["rows"]


def test_the_error_of_flow_samplers_falls_with_the_steps(base, run_script):
    make_data()
    run_dir = make_run(run_script, "a")
    args = ("--steps=16,64,200", "--reference_steps=200", "--num_images=0", "--cfg_scale=1")
    rows = compared(run_script, run_dir, *args)
    error = {(row["sampler"], row["steps"]): row["error"] for row in rows}
    assert [error["sde", n] for n in (16, 64, 200)] == [None] * 3
    assert error["heun", 200] == 0  # it is the reference itself
    assert error["euler", 64] < 0.7 * error["euler", 16] and error["euler", 200] < 0.2 * error["euler", 64]
    assert error["heun", 64] < 0.7 * error["heun", 16]
    assert [row["evaluations"] for row in rows if row["sampler"] == "heun"] == [31, 127, 399]


def test_gaussian_samplers_with_distances_in_the_report(base, run_script, quick_classifier):  # noqa: F811
    make_data()
    run_dir = make_run(run_script, "a", "--objective=v", "--num_timesteps=40")
    rows = compared(run_script, run_dir, "--steps=2,40,99", "--samplers=ddim,ddpm", "--num_images=12")
    assert [(row["sampler"], row["steps"]) for row in rows] == [(s, n) for s in ("ddim", "ddpm") for n in (2, 40)]
    assert all(row["fd_classifier"] > 0 and 0 <= row["class_accuracy"] <= 1 for row in rows)
    page = (run_dir / "report.html").read_text()
    assert "<th>fd_classifier</th>" in page and "<th>ddim, 40</th>" in page


def test_mistakes(base, run_script):
    make_data()
    run_dir = make_run(run_script, "a")
    for args, message in (
        ("--steps=5,0", "steps='5,0'; accepted: whole numbers from 1"),
        ("--samplers=ddim", "not a sampler of flow matching"),
        ("--cfg_interval=1,0", "cfg_interval='1,0'; accepted: two numbers from 0 to 1"),
    ):
        with pytest.raises(UserError, match=message):
            compared(run_script, run_dir, args)
