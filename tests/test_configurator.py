"""Settings: who wins, which types are accepted, what a mistake prints, and that presets are data."""

import os
import re
import subprocess
import sys

import pytest
from conftest import ROOT
from image_helpers import write

from configurator import RULE, read_settings, satisfies

SCRIPT = '''"""
A program.
"""
import math
from configurator import configure
TABLE = {"euler": 1, "heun": 2}

# ----------------------------------------------------------------
# Settings: this is for readers of the source

# What everybody touches
depth = 12  # >= 1: layers
width = 256  # of a block
dtype = "auto"  # auto|bfloat16|float32: of the forward pass
sampler = "auto"  # auto|{TABLE}: the names of a table
#                   and a second line of help
# Only dtype=bfloat16|float32
dropout = 0.0  # [0, 1)
# Run
device_type = ""  # ""|cuda|cpu: "" is the best present
label_drop = 0.1  # [0, 1): fraction dropped
lr = 1.0  # > 0
tag = "dummy"  # name: of the run
compile = True  # use torch.compile
resume = "auto"  # auto|never or >= 0: step number
save_every = 1000  # >= 1 or -1: -1 disables
ema_rates = "0.999"  # comma-separated
shift = -1.5
_private = 3
HERE = math.floor
table = {"depth": 1}
a, b = 1, 2
config = configure(globals(), ARGV)
after = 5
'''
exec(SCRIPT.split("_private")[0].split("import configure")[1], DEFAULTS := {})
DEFAULTS = {name: value for name, value in DEFAULTS.items() if name.islower() and name[0] != "_"}


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("script") / "program.py"
    path.write_text(SCRIPT)
    code = compile(SCRIPT, path, "exec")

    def run(*argv):
        """The globals of the program after it ran with these arguments."""
        globals_ = {
            "__file__": str(path),
            "__name__": "__main__",
            "ARGV": [str(arg) for arg in argv],
        }
        exec(code, globals_)
        return globals_

    return run


@pytest.fixture
def preset(tmp_path):
    return lambda text, name="preset.py": write(tmp_path / name, text)


def mistake(script, capsys, *argv) -> str:
    """The one line that the program prints when it refuses these arguments."""
    with pytest.raises(SystemExit) as stop:
        script(*argv)
    out, err = capsys.readouterr()
    assert stop.value.code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert err.endswith("\n")
    return err


@pytest.mark.parametrize(
    "given, name, value",
    [
        ("--depth=1_000_000", "depth", 1_000_000),
        ("--depth=1e6", "depth", 1_000_000),
        ("--lr=3", "lr", 3.0),
        ("--shift=-2", "shift", -2.0),
        ("--tag=12", "tag", "12"),
        ("--tag=", "tag", ""),
        ("--tag=a=b", "tag", "a=b"),
        ("--compile", "compile", True),
        ("--compile=false", "compile", False),
        ("--sampler=heun", "sampler", "heun"),
        ("lr = 3", "lr", 3.0),
        ("shift = -2", "shift", -2.0),
        ("depth = 1e6", "depth", 1_000_000),
        ("tag = 12", "tag", "12"),
        ("ema_rates = (0.99, 0.999)", "ema_rates", "0.99,0.999"),
        ("compile = False", "compile", False),
        ("tag = 'é=\\n'", "tag", "é=\n"),
    ],
)
def test_values_on_the_command_line_and_in_a_preset(script, preset, given, name, value):
    names = script(given if given.startswith("--") else preset(given))
    assert repr({**names["config"]}) == repr(DEFAULTS | {name: value})
    assert names[name] == value  # also of this type


def test_later_wins_and_what_is_given_twice_is_said(script, preset, capsys):
    """In the order given, between presets, within one, and between presets and keys."""
    assert script("--tag=a", "--tag=b", "--lr=2")["tag"] == "b"  # as a shell makes of --path=shard-{0..2}.tar
    assert capsys.readouterr().out == "tag is given again by --tag=b: the last one counts\n"
    one = preset("depth = 1\ndepth = 2\nwidth = 10\n", "one.py")
    two = preset("depth = 3\n", "two.py")
    assert script("--depth=5", two)["depth"] == 3
    assert capsys.readouterr().out == f"depth is given again by {two}: the last one counts\n"
    assert script(two, "--depth=5")["depth"] == 5
    both = script(one, two)
    assert both["depth"] == 3
    assert both["width"] == 10
    assert script("--depth=9", one)["depth"] == 2
    assert script("--depth=8", one, "--depth=9")["depth"] == 9


def test_preset_path_is_relative_to_here_then_to_the_repository(script, preset, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    preset("depth = 5")
    assert script("preset.py")["depth"] == 5
    monkeypatch.setattr("configurator.ROOT", tmp_path / "repo")
    for place, depth in (
        ("repo/runs", 7),
        ("runs", 8),
    ):
        preset(f"depth = {depth}", f"{place}/d.py")
        assert script("runs/d.py")["depth"] == depth


@pytest.mark.parametrize(
    "arg, parts",
    [
        ("--depht=4", ["depht", "nearest: depth"]),
        ("--save-every=4", ["save-every", "nearest: save_every"]),
        ("--zzzz=4", ["zzzz", "--help"]),
        ("--_private=4", ["_private"]),
        ("--", ["''"]),
        ("--depth=1.5", ["depth=1.5", "an integer"]),
        ("--depth=four", ["depth='four'", "an integer"]),
        ("--depth=1e400", ["depth=inf"]),
        ("--depth=0", ["depth=0", ">= 1"]),
        ("--lr=nan", ["lr=nan", "a finite number"]),
        ("--compile=yes", ["compile='yes'", "True or False"]),
        ("--dtype=float64", ["dtype='float64'", "auto|bfloat16|float32"]),
        ("--resume=later", ["auto|never or >= 0"]),
        ("depth=4", ["'depth=4'"]),
        ("preset", ["'preset'"]),
        ("missing.py", ["'missing.py'", "No such file"]),
        ("a" * 300 + ".py", ["name too long"]),
        ("--compile=a\nb", ["compile='a\\nb'"]),
        ("--sampler=ddim", ["auto|euler|heun"]),
        ("--tag mine", ["write --tag=VALUE; name: of"]),
        ("--compile 0", ["'0' is no --key=value"]),
        ("--depth", ["--depth has no value; write --depth=VALUE; >= 1: layers"]),
        ("--learning_rate=1", ["nearest: lr;"]),
        ("--device=cpu", ["nearest: device_type;"]),
        ("--epochs=3", ["nearest: depth, "]),  # no num_epochs
        ("--batch_size=8", ["; sample has it"]),
        ("--path=a", ["; prepare_data has it;"]),
        ("runs/shapescpu.py", ["nearest: runs/shapes_cpu.py, "]),
        ("shapes_cpu.py", ["no --key=value and no preset: ", "nearest: runs/shapes_cpu.py, "]),
        ("runs/shapes_cpu", ["nearest: runs/shapes_cpu.py, "]),
        ("--config=runs/shapes_cpu.py", ["unknown setting 'config'", "; a preset stands alone;"]),
    ],
)
def test_mistakes_on_the_command_line(script, capsys, arg, parts):
    line = mistake(script, capsys, "--width=3", *arg.split(" "))
    for part in parts:
        assert part in line, line


def test_a_locale_that_garbles_names_is_refused(script, capsys, monkeypatch):
    """It would store them so that nobody could ask for them in another."""
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: "ascii")
    assert "reads names as ascii; accepted: utf-8, such as by PYTHONUTF8=1" in mistake(script, capsys, "--depth=3")


@pytest.mark.parametrize(
    "text, parts",
    [
        ("depth = 3\ndepht = 4", ["line 2", "depht", "nearest: depth"]),
        ("\n\ndepth = 'four'", ["line 3", "depth='four'", "an integer"]),
        ("tag = None", ["tag"]),
        ("tag = {'a': 1}", ["tag={'a': 1}"]),
        ("ema_rates = (0.9, None)", ["ema_rates=(0.9, None)"]),
        ("depth = ().__class__", ["literals"]),
        ("lr = 1e999", ["lr=inf"]),
        ("lr = 1" + "0" * 400, ["finite"]),
        ("depth = 3\ndepth += 4", ["line 2", "literals"]),
        ("depth = width", ["line 1", "literals"]),
        ("depth = width = 1", ["literals"]),
        ("import os", ["literals"]),
        ("depth = 3\nwidth = (", ["line 2"]),
        (b"depth = \xff", ["preset.py"]),
    ],
)
def test_mistakes_in_a_preset(script, preset, capsys, text, parts):
    line = mistake(script, capsys, preset(text))
    for part in parts:
        assert part in line, line


@pytest.mark.parametrize("columns", [45, 100])
def test_help_prints_every_setting_with_default_and_comment(script, capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    printed = []
    for argv in (
        ["-h", "--nonsense"],
        ["--help=all"],
    ):
        with pytest.raises(SystemExit, match="0"):
            script("--depth=3", *argv)
        printed.append(capsys.readouterr().out)
    short, out = printed
    assert "--sampler=" in short
    assert "--dropout=" not in short
    assert short.endswith(f"\n--help=all: {len(DEFAULTS) - 4} more settings\n")
    lines = out.splitlines()
    starts = [line.lstrip().partition(" ")[0] for line in lines]
    places = [starts.index(f"--{name}={value}") for name, value in DEFAULTS.items() if value != ""]
    assert places == sorted(places)  # file order
    assert lines[places[0]].split()[:4] == ["--depth=12", "int", ">=", "1:"]
    assert lines.index("What everybody touches") < places[0]
    assert places[0] < lines.index("Run") < places[-1]
    assert "auto|euler|heun: the names of a table and a second line of help" in " ".join(out.split())
    assert max(map(len, lines[1:])) <= 100
    assert "_private" not in out


def test_a_module_declares_settings_where_it_uses_them(script, tmp_path, monkeypatch):
    """Fields and parameters under "# Only ..." are settings like the script's; others, and other comments, are not."""
    monkeypatch.setattr("configurator.ROOT", tmp_path)
    fields = "    # Only depth > 12\n    sizes: tuple[int, ...] = (16, 8)  # in pixels\n    #     of a map\n"
    rate = "        # Only depth > 12\n        rate: float = 0.5,  # [0, 1): a rate\n"  # of a method
    fields = f"class A:\n    wide: int = 1  # no setting\n{fields}{rate}"
    write(tmp_path / "nanodiff" / "part.py", fields)
    settings = read_settings(script(), ["part"])
    assert [*settings][-2:] == ["sizes", "rate"]
    assert len(settings) == len(DEFAULTS) + 2
    assert settings["sizes"] == ("16,8", "", "in pixels of a map", ["Only depth > 12"], [("depth", " > 12")])
    assert settings["rate"][:2] == (0.5, "[0, 1)")
    assert settings["rate"].only == settings["sizes"].only


def test_every_rule_of_a_script_is_read():
    """One that is not would be checked by nobody."""
    paths = [*(ROOT / "scripts").rglob("*.py"), *(ROOT / "nanodiff").rglob("*.py")]
    text = "".join(path.read_text() for path in paths)
    rules = re.findall(r"^ *\w+(?:: \w+)? = .*[^)]  # ([<>\[].*)", text, re.M)
    assert len(rules) > 50
    for rule in rules:
        assert RULE.match(rule), rule


@pytest.mark.parametrize(
    "rule, accepted, refused",
    [
        (">= 1", [1, 2.5, "7"], [0, 0.999, "x", "", "True"]),
        ("> 0", [1e-9], [0]),
        ("< 1e-3", [0], [0.001]),
        ("(-1, 0.5]", [0.5, -0.9], [-1, 0.51]),
        ("-1 or [2, 4]", [-1, 2, 4], [0, 5]),
        ("2|4", [2, 4.0], [3, 24]),
        ("a|b-c", ["a", "b-c"], ["b", "", "A"]),
        ('""|a', ["", "a"], ['""', " "]),
        ("auto|never or >= 0", ["auto", "0", "12"], ["-1", "Auto", "nan"]),
    ],
)
def test_rules_accept_and_refuse(rule, accepted, refused):
    assert [v for v in accepted if not satisfies(v, rule)] == []
    assert [v for v in refused if satisfies(v, rule)] == []


def test_as_a_program(tmp_path):
    """sys.argv is the default, an error has no traceback, and only rank 0 speaks."""
    (tmp_path / "program.py").write_text(SCRIPT.replace(", ARGV", "") + "print(depth)\n")

    def run(*argv, rank="0"):
        env = {**os.environ, "RANK": rank, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "program", *argv]
        r = subprocess.run(
            command,
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            timeout=60,
        )
        return r.returncode, r.stdout, r.stderr

    _, help_text, _ = run("--help")
    assert "python3 -m scripts.program [preset.py ...]" in help_text
    assert run("--depth=3") == (0, "3\n", "")
    assert run("--depth=x") == (2, "", "error: depth='x' is not accepted; accepted: an integer, >= 1\n")
    assert run("--depth=x", rank="1") == (2, "", "")


def test_a_setting_that_would_do_nothing_is_refused(script, capsys):
    config = script("--dropout=0.3", "--dtype=float32")["config"]
    assert config["dropout"] == 0.3
    assert config.defaults["dropout"] == 0.0
    assert script("--dropout=0")["dropout"] == 0
    line = mistake(script, capsys, "--dropout=0.3")
    assert line == "error: dropout=0.3 would do nothing: only dtype=bfloat16|float32 uses it, and dtype='auto'\n"
