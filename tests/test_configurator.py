"""Settings: who wins, which types are accepted, what a mistake prints, and that presets are data."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from configurator import configure, find_rule, satisfies

ROOT = Path(__file__).parents[1]
SCRIPT = '''"""A program."""
import math
from configurator import configure

# ----------------------------------------------------------------
# Model
depth = 12  # >= 1: layers
width = 64 * 4  # derived from an expression
dtype = "auto"  # auto|bfloat16|float32: of the forward pass
device_type = ""  # ""|cuda|cpu: "" is the best present
label_drop = 0.1  # [0, 1): fraction dropped
lr = 1.0  # > 0
# Run
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
DEFAULTS = {
    "depth": 12, "width": 256, "dtype": "auto", "device_type": "", "label_drop": 0.1, "lr": 1.0, "tag": "dummy",
    "compile": True, "resume": "auto", "save_every": 1000, "ema_rates": "0.999", "shift": -1.5,
}  # fmt: skip


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("script") / "program.py"
    path.write_text(SCRIPT)
    code = compile(SCRIPT, path, "exec")

    def run(*argv):
        """The globals of the program after it ran with these arguments."""
        globals_ = {"__file__": str(path), "__name__": "__main__", "ARGV": [str(arg) for arg in argv]}
        exec(code, globals_)
        return globals_

    return run


@pytest.fixture
def preset(tmp_path):
    def write(text, name="preset.py"):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def mistake(script, capsys, *argv) -> str:
    """The one line that the program prints when it refuses these arguments."""
    with pytest.raises(SystemExit) as stop:
        script(*argv)
    out, err = capsys.readouterr()
    assert (stop.value.code, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1 and err.endswith("\n")
    return err


def typed(config):
    return {name: (type(value), value) for name, value in config.items()}


def test_no_arguments_gives_the_defaults_in_file_order(script):
    config = script()["config"]
    assert typed(config) == typed(DEFAULTS)
    assert list(config) == list(DEFAULTS)


def test_only_values_of_settings_change(script):
    plain, changed = script(), script("--depth=3", "--tag=x")
    names = set(plain) - {"__builtins__"}
    assert names == set(changed) - {"__builtins__"}
    assert {n for n in names if plain[n] != changed[n]} == {"depth", "tag", "config", "ARGV"}
    assert changed["depth"] == 3


@pytest.mark.parametrize(
    "arg, name, value",
    [
        ("--depth=4", "depth", 4), ("--depth=1_000_000", "depth", 1_000_000), ("--depth=1e6", "depth", 1_000_000),
        ("--depth=5.0", "depth", 5), ("--lr=3", "lr", 3.0), ("--lr=1e-3", "lr", 0.001), ("--lr=.5", "lr", 0.5),
        ("--shift=-2", "shift", -2.0), ("--save_every=-1", "save_every", -1), ("--tag=12", "tag", "12"),
        ("--tag=", "tag", ""), ("--tag=a=b=c", "tag", "a=b=c"), ("--tag=None", "tag", "None"),
        ("--tag=True", "tag", "True"),  ("--compile", "compile", True), ("--compile=False", "compile", False),
        ("--compile=false", "compile", False),
        ("--compile=1", "compile", True),  ("--ema_rates=0.99,0.9999", "ema_rates", "0.99,0.9999"),
        ("--device_type=", "device_type", ""), ("--device_type=cpu", "device_type", "cpu"),
        ("--resume=100", "resume", "100"), ("--resume=never", "resume", "never"),
    ],
)  # fmt: skip
def test_command_line_values(script, arg, name, value):
    assert typed(script(arg)["config"]) == typed(DEFAULTS | {name: value})
    assert script(arg)[name] == value


@pytest.mark.parametrize(
    "literal, name, value",
    [
        ("3", "lr", 3.0), ("-2", "shift", -2.0), ("1e6", "depth", 1_000_000), ("12", "tag", "12"),
        ("100", "resume", "100"), ("(0.99, 0.999)", "ema_rates", "0.99,0.999"), ("[0.5]", "ema_rates", "0.5"),
        ("0.9", "ema_rates", "0.9"), ("False", "compile", False), ("0", "compile", False),
        ("'é=\\n'", "tag", "é=\n"),
    ],
)  # fmt: skip
def test_preset_values(script, preset, literal, name, value):
    assert typed(script(preset(f"{name} = {literal}"))["config"]) == typed(DEFAULTS | {name: value})


def test_later_wins(script, preset):
    """In the order given, between presets, within one, and between presets and keys."""
    one = preset('"""A preset."""\n# a comment\ndepth = 1\ndepth = 2\nwidth = 10\n', "one.py")
    two = preset("depth = 3\n", "two.py")
    both = script(one, two)
    assert (both["depth"], both["width"]) == (3, 10)
    assert script(two, one)["depth"] == 2
    assert script(one, "--depth=9")["depth"] == 9
    assert script("--depth=9", one)["depth"] == 2
    assert script("--depth=8", "--depth=9")["depth"] == 9


def test_preset_path_is_relative_to_here_then_to_the_repository(script, preset, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    preset("depth = 5")
    assert script("preset.py")["depth"] == 5
    monkeypatch.setattr("configurator.__file__", str(tmp_path / "repo" / "configurator.py"))
    (tmp_path / "repo" / "runs").mkdir(parents=True)
    (tmp_path / "repo" / "runs" / "d7.py").write_text("depth = 7")
    assert script("runs/d7.py")["depth"] == 7
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "d7.py").write_text("depth = 8")
    assert script("runs/d7.py")["depth"] == 8


@pytest.mark.parametrize(
    "arg, parts",
    [
        ("--depht=4", ["depht", "nearest: depth"]), ("--save-every=4", ["save-every", "nearest: save_every"]),
        ("--zzzz=4", ["zzzz", "--help"]), ("--_private=4", ["_private"]), ("--after=4", ["after"]),
        ("--config=4", ["config"]), ("--a=4", ["'a'"]), ("--=4", ["''"]), ("--", ["''"]),
        ("--depth=1.5", ["depth=1.5", "an integer"]), ("--depth=four", ["depth='four'", "an integer"]),
        ("--depth=", ["depth=''"]), ("--depth=True", ["depth=True"]), ("--depth=1e400", ["depth=inf"]),
        ("--depth=None", ["depth='None'"]), ("--depth", ["--depth=...", "an integer, >= 1"]),
        ("--depth=0", ["depth=0", ">= 1"]),  ("--lr=nan", ["lr=nan", "a finite number"]), ("--lr=inf", ["lr=inf"]),
        ("--lr=0", ["lr=0", "> 0"]),
        ("--label_drop=1", ["label_drop=1", "[0, 1)"]), ("--label_drop=-0.1", ["[0, 1)"]),
        ("--compile=2", ["compile=2", "True or False"]), ("--compile=yes", ["compile='yes'"]),
        ("--dtype=float64", ["dtype='float64'", "auto|bfloat16|float32"]), ("--dtype=", ["dtype=''"]),
        ("--dtype=auto|bfloat16", ["dtype='auto|bfloat16'"]), ("--device_type=gpu", ['""|cuda|cpu']),
        ("--save_every=0", ["save_every=0", ">= 1 or -1"]), ("--save_every=-2", ["save_every=-2"]),
        ("--resume=-1", ["resume='-1'"]), ("--resume=later", ["auto|never or >= 0"]), ("--resume=nan", ["nan"]),
        ("--tag", ["--tag=..."]), ("depth=4", ["'depth=4'"]),
        ("-depth=4", ["'-depth=4'"]), ("preset", ["'preset'"]), ("missing.py", ["'missing.py'", "not found"]),
        ("", ["''"]), ("a" * 300 + ".py", ["not found"]),
        ("--ta\ng=1", ["nearest: tag"]), ("--compile=a\nb", ["compile='a\\nb'"]),
    ],
)  # fmt: skip
def test_mistakes_on_the_command_line(script, capsys, arg, parts):
    line = mistake(script, capsys, "--width=3", arg)
    assert all(part in line for part in parts), line


@pytest.mark.parametrize(
    "text, parts",
    [
        ("depth = 3\ndepht = 4", ["line 2", "depht", "nearest: depth"]),
        ("\n\ndepth = 'four'", ["line 3", "depth='four'", "an integer"]), ("depth = '4'", ["depth='4'"]),
        ("depth = True", ["depth=True"]), ("tag = True", ["tag=True"]), ("tag = None", ["tag"]),
        ("tag = {'a': 1}", ["tag={'a': 1}"]), ("ema_rates = (0.9, None)", ["ema_rates=(0.9, None)"]),
        ("lr = 1j", ["lr=1j"]), ("tag = b'x'", ["tag=b'x'"]),   ("depth = (x := 3)", ["literals"]),
        ("depth = ().__class__", ["literals"]),
        ("depth = lambda: 3", ["literals"]), ("lr = 1e999", ["lr=inf"]),
        ("lr = 1" + "0" * 400, ["finite"]), ("dtype = 'float64'", ["line 1", "auto|bfloat16|float32"]),
        ("depth = 3\ndepth == 4", ["line 2", "literals"]), ("depth = width", ["line 1", "literals"]),
        ("depth = 2 * 3", ["literals"]), ("depth += 1", ["literals"]), ("a.depth = 1", ["literals"]),
        ("depth = width = 1", ["literals"]), ("depth, width = 1, 2", ["literals"]), ("depth: int = 1", ["literals"]),
        ("if True:\n    depth = 3", ["line 1", "literals"]), ("import os", ["literals"]),
        ("lr = float('1')", ["literals"]), ("tag = f'{1}'", ["literals"]), ("3", ["literals"]),
        ("depth = 3\nwidth = (", ["line 2"]), ("depth = 3\n  width = 4", ["line 2"]), (b"depth = \xff", ["preset.py"]),
        (b"depth = 1\x00", ["preset.py"]),   ],
)  # fmt: skip
def test_mistakes_in_a_preset(script, preset, capsys, text, parts):
    line = mistake(script, capsys, preset(text))
    assert all(part in line for part in parts), line


@pytest.mark.parametrize("argv", [["--help"], ["-h"], ["--depth=3", "--help", "--nonsense"]])
def test_help_prints_every_setting_with_default_and_comment(script, capsys, argv):
    with pytest.raises(SystemExit) as stop:
        script(*argv)
    out, err = capsys.readouterr()
    assert (stop.value.code, err) == (0, "")
    lines = out.splitlines()
    rows = [next(line for line in lines if line.split()[:1] == [f"--{n}={v}"]) for n, v in DEFAULTS.items() if v != ""]
    assert [lines.index(row) for row in rows] == sorted(lines.index(row) for row in rows)  # file order
    assert rows[0].split(None, 2) == ["--depth=12", "int", ">= 1: layers"]
    assert lines.index("Model") < lines.index(rows[0]) < lines.index("Run") < lines.index(rows[-1])
    assert "A program." in out and "_private" not in out and "after" not in out


def test_the_defaults_that_help_shows_are_accepted(script):
    assert script(*[f"--{name}={v}" for name, v in DEFAULTS.items()])["config"] == DEFAULTS


@pytest.mark.parametrize(
    "comment, rule",
    [
        (">=1: layers", ">=1"), ("< 1e-3: tiny", "< 1e-3"), ("(0,1): open", "(0,1)"), ("a|b:", "a|b"),
        ("-1 or > 0: count", "-1 or > 0"), ("flow or eps|x0: what", "flow or eps|x0"), ("steps: between saves", ""),
        ("a or b: prose", ""), ("(optional): prose", ""), ("images, a|b: prose", ""), ("seed: a|b", ""), ("", ""),
    ],
)  # fmt: skip
def test_rules_are_found_in_comments(comment, rule):
    assert find_rule(comment) == rule


@pytest.mark.parametrize(
    "rule, accepted, refused",
    [
        (">= 1", [1, 2.5, "7"], [0, 0.999, "x", "", "True"]), ("> 0", [1e-9], [0, -0.0]), ("<= -1", [-1, -2], [0]),
        ("< 1e-3", [0, -5, 0.0009], [0.001]), ("[0, 1)", [0, 0.0, 0.5], [1, -1e-9]),
        ("(-1, 0.5]", [0.5, 0, -0.9], [-1, 0.51]), ("-1 or [2, 4]", [-1, -1.0, 2, 4], [0, 1, 5, -2]),
        ("2|4|8", [2, 4.0, 8], [3, 24]), ("0.5|1", [0.5, 1], [2]),
        ("a|b-c", ["a", "b-c"], ["b", "c", "", "a|b-c", "A"]), ('""|a', ["", "a"], ['""', " "]),
        ("auto|never or >= 0", ["auto", "0", "12"], ["-1", "Auto", "nan", "True"]),
    ],
)  # fmt: skip
def test_rules_accept_and_refuse(rule, accepted, refused):
    assert find_rule(rule) == rule
    assert [v for v in accepted if not satisfies(v, rule)] == []
    assert [v for v in refused if satisfies(v, rule)] == []


@pytest.mark.parametrize(
    "setting, error, words",
    [
        ("depth = 0  # >= 1: layers", ValueError, "depth=0"),  # a default breaks its own rule
        ("depth = 1  # >= one: layers", AssertionError, ">= one"),  # a rule that cannot be read
    ],
)
def test_mistakes_of_the_script_itself_are_loud(tmp_path, setting, error, words):
    path = tmp_path / "program.py"
    path.write_text(f"{setting}\nconfig = configure(globals())\n")
    with pytest.raises(error, match=words):
        exec(path.read_text(), {"__file__": str(path), "configure": lambda g: configure(g, [])})


def test_as_a_program(tmp_path):
    """sys.argv is the default, an error has no traceback, and only rank 0 speaks."""
    (tmp_path / "program.py").write_text(SCRIPT.replace(", ARGV", "") + "print(depth)\n")

    def run(*argv, rank="0"):
        env = {**os.environ, "RANK": rank, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "program", *argv]
        r = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
        return r.returncode, r.stdout, r.stderr

    assert run("--depth=3") == (0, "3\n", "")
    assert run("--depth=x") == (2, "", "error: depth='x' is not accepted; accepted: an integer, >= 1\n")
    assert run("--depth=x", rank="1") == (2, "", "")
    assert run("--help", rank="1") == (0, "", "")
    assert "python -m program [preset.py ...]" in run("--help")[1]


CONDITIONAL = '''"""A program."""
from configurator import configure
TABLE = {"euler": 1, "heun": 2}
arch = "dit"  # dit|classic|unet
sampler = "auto"  # auto|{TABLE}: the names of a table
#                   and a second line of help
# Only arch=unet|classic
dropout = 0.0  # [0, 1)
# Everything
tail = 1  # > 0
config = configure(globals(), ARGV)
'''


@pytest.fixture
def conditional(tmp_path):
    path = tmp_path / "conditional.py"
    path.write_text(CONDITIONAL)

    def run(*argv):
        globals_ = {"__file__": str(path), "__name__": "__main__", "ARGV": list(argv)}
        exec(compile(CONDITIONAL, path, "exec"), globals_)
        return globals_["config"]

    return run


def test_a_setting_that_would_do_nothing_is_refused(conditional, capsys):
    assert conditional("--arch=unet", "--dropout=0.3") == conditional("--dropout=0.3", "--arch=unet")
    assert conditional("--tail=2")["tail"] == 2 and conditional("--dropout=0")["dropout"] == 0
    line = mistake(conditional, capsys, "--dropout=0.3")
    assert line == "error: dropout=0.3 would do nothing: only arch=unet|classic uses it, and arch='dit'\n"


def test_names_of_a_table_are_rule_and_help(conditional, capsys):
    assert conditional("--sampler=heun")["sampler"] == "heun"
    assert "auto|euler|heun" in mistake(conditional, capsys, "--sampler=ddim")
    with pytest.raises(SystemExit):
        conditional("--help")
    out = capsys.readouterr().out
    assert "auto|euler|heun: the names of a table" in out and "and a second line of help" in out
    assert out.index("dropout") < out.index("Everything")


def test_the_defaults_stay_known(conditional):
    config = conditional("--arch=unet")
    assert (config["arch"], config.defaults["arch"]) == ("unet", "dit")
