"""A script's settings: the assignments at its top, overridden by presets and the command line.

    depth = 12                        # >= 1: layers; the one dial of model size
    dtype = "auto"                    # auto|bfloat16|float16|float32: dtype of the matrix products
    sampler = "auto"                  # auto|{SAMPLERS}: {SAMPLERS} stands for the names in the script's table SAMPLERS
    #                                   a comment continues on lines starting with "#" and three spaces
    # Only arch=unet                    a heading; "Only" refuses the settings below it where they would do nothing;
    #                                   a comparison is possible, too: Only lora_rank > 0
    dropout = 0.0                     # [0, 1): dropout rate
    config = configure(globals())

Defaults are literals. A part of the program can have its settings in its own module, listed in configure's `modules`:
as assignments like a script's; or as fields of a class or parameters of a function, under a comment "# Only ...".

Then `python3 -m scripts.base_train [preset.py ...] [--key=value ...]`: later wins, --help=all lists everything; --help
stops after the group "What everybody touches", if there is one.
The trailing comment is both the help and the check. It may begin with a rule, which ends at ": " or the line's end:
alternatives separated by "|" or " or ", each a comparison (`>= 1`), an interval (`[0, 1)`) or a plain value
(`auto`, `-1`, `""`).

A preset is a file of literal assignments (`depth = 12`), parsed and never executed. A tuple or list in it becomes a
comma string: (0.99, 0.999) is "0.99,0.999". A mistake prints one line, "error: ...", and exits with code 2.
"""

import ast
import difflib
import operator
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable
from contextlib import suppress
from numbers import Real
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent
# What other programs, or older versions, call a setting
ALIASES = dict(
    pair.split("=")
    for pair in """
    learning_rate=lr
    batch_size=total_batch_size
    epochs=num_epochs
    device=device_type
    max_steps=num_iterations
    given=pairs
    image_size=resolution
    n=num_images
    """.split()
)
KINDS = {bool: "True or False", int: "an integer", float: "a finite number", str: "a string"}
COMPARE = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "[": operator.ge,
    "(": operator.gt,
    "]": operator.le,
    ")": operator.lt,
}
NUMBER = r"-?[\d.]+(?:e[+-]?\d+)?"
PART = rf'(?:[<>]=? ?{NUMBER}|[\[(]{NUMBER}, ?{NUMBER}[\])]|[\w.+-]+|"")'
RULE = re.compile(rf"(?=[^:]*[|<>\[(])({PART}(?:(?:\|| or ){PART})*)(?:: |:?$)")  # a lone word is prose: "name: ..."
# A script's assignment of a literal, a class's field or a function's parameter: (name, value, comment)
SETTING = re.compile(r'([a-z]\w*)(?:: .+?)? = (["\d(TF-].*?),?(?:  # (.*))?')
ONLY = re.compile(r"Only (\w+)(=[\w|-]+|=\"\"| [<>]=? \d+)")


class Setting(NamedTuple):
    default: bool | int | float | str
    rule: str  # "" if the comment begins with no rule
    comment: str
    heading: list[str]  # lines of comment above the setting
    only: list[tuple[str, str]]  # ("arch", "=unet|dit"), ("rank", " > 0"): it is used only with these settings


Settings = dict[str, Setting]  # by name


def nearest(name: str, names: Iterable[str]) -> str:
    """The names most like `name`, at most three, for messages; "none" if there are none."""
    return ", ".join(difflib.get_close_matches(name, names, cutoff=0)) or "none"


def satisfies(value, rule: str) -> bool:
    """True if a value of the right type meets any part of a rule."""
    return any(satisfies_part(value, part) for part in re.split(r"\|| or ", rule))


def satisfies_part(value, part: str) -> bool:
    signs = re.findall(r"[<>]=?|[\[\]()]", part)
    if not signs:
        plain = part.strip('"')
        return value in (plain, literal(plain))
    if isinstance(value, str) and not value.isdecimal():  # a word; a setting of words may also have a number
        return False
    bounds = map(float, re.findall(NUMBER, part))
    return all(COMPARE[sign](float(value), bound) for sign, bound in zip(signs, bounds))


def literal(text: str):
    """Command-line text of a setting that is not a string -> bool, int, float, or unchanged."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return {"true": True, "false": False}.get(text.lower(), text)


def cast(kind: type, value):
    """Convert to the setting's type; None if that would lose information or be a guess."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if kind is bool:
        is_accepted = value in (0, 1)
    elif kind is int:  # 1e6 is an integer, 1.5 and inf are not
        is_accepted = is_number and value % 1 == 0 and abs(value) < 2**63
    elif kind is float:  # false for inf, nan and 10**400
        is_accepted = is_number and abs(value) <= sys.float_info.max
    elif isinstance(value, list | tuple):
        items = [cast(str, item) for item in value]
        return None if None in items else ",".join(items)
    else:
        is_accepted = is_number or isinstance(value, str | Path)
    return kind(value) if is_accepted else None


def check(settings: Settings, name: str, value, place: str = ""):
    """Convert a value, perhaps given as text, to the setting's type. Raises ValueError with the line for the user."""
    if name not in settings:
        word = name.replace("-", "_")
        near = ALIASES.get(word)
        if near not in settings:
            near = nearest(word, settings)
            for file in [*ROOT.glob("scripts/*.py"), ROOT / "nanodiff/sampling/settings.py"]:
                source, _, _ = file.read_text(encoding="utf-8").partition("configure(globals()")
                if f"\n{name} = " in source:
                    near += f"; {file.stem.replace('settings', 'sample')} has it"
        if str(value).endswith(".py"):  # --config=runs/a.py
            near += "; a preset stands alone"
        raise ValueError(f"{place}unknown setting {name!r}; nearest: {near}; --help=all lists all")
    rule = settings[name].rule
    kind = type(settings[name].default)
    if isinstance(value, str) and kind is not str:
        value = literal(value)
    result = cast(kind, value)
    if result is None or (rule and not satisfies(result, rule)):
        limits = f"{KINDS[kind]}, {rule}".rstrip(", ")
        raise ValueError(f"{place}{name}={value!r} is not accepted; accepted: {limits}")
    return result


class Config(dict):
    """{name: value} of all settings; `defaults` of all, `overrides` of those from presets and the command line."""

    defaults: dict
    overrides: dict


def read_settings(globals_: dict, modules=()) -> Settings:
    """The settings of the calling script in file order: its assignments of literals up to the call of configure. Then
    those of `modules`, such as models/dit: fields and parameters under "# Only ..." or, without that, assignments."""
    source = Path(globals_["__file__"]).read_text(encoding="utf-8").partition("configure(globals()")[0]
    for module in modules:
        text = (ROOT / f"nanodiff/{module}.py").read_text(encoding="utf-8")
        groups = re.findall(r"^ +# Only .*\n(?: +(?:\w+: .* = .*  #|#  ) .*\n)+", text, re.M)
        source += "\n".join(["", *map(textwrap.dedent, groups or [text])])
    table = lambda match: "|".join(globals_[match[1]])  # {SAMPLERS} -> euler|heun|...
    settings = {}
    heading = []
    only = []
    for line in re.sub(r"\n#   +", " ", source).splitlines():  # each comment in one line
        if line.startswith("# "):
            heading.append(line.strip("#- "))
            continue
        if match := SETTING.fullmatch(line):
            name, text, comment = match.groups("")
            default = ast.literal_eval(text)
            if isinstance(default, tuple):  # a field's
                default = cast(str, default)
            comment = re.sub(r"\{(\w+)\}", table, comment)
            rule = RULE.match(comment)
            if heading:
                only = ONLY.findall(" ".join(heading))
            settings[name] = Setting(default, rule[1] if rule else "", comment, heading, only)
            check(settings, name, default)
        heading = []  # a comment with a blank line below is no heading
    return settings


def read_preset(settings: Settings, path: str) -> dict:
    """{name: value} of a preset's assignments. Raises ValueError naming the file and the line."""
    values = {}
    try:
        file = Path(path)
        if not file.is_file():
            file = ROOT / path
        nodes = ast.parse(file.read_bytes(), path).body
    except (SyntaxError, ValueError, OSError) as error:
        presets = [f"runs/{file.name}" for file in ROOT.glob("runs/*.py")]
        raise ValueError(
            f"{path!r} is no --key=value and no preset: {error}; nearest: {nearest(path, presets)}"
        ) from None
    for node in nodes:
        place = f"preset {path!r} line {node.lineno}: "
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # a docstring
        try:
            (target,) = node.targets
            name = target.id
            value = ast.literal_eval(node.value)
        except (AttributeError, ValueError, TypeError):
            raise ValueError(f"{place}only assignments of literals are accepted, such as depth = 12") from None
        values[name] = check(settings, name, value, place)
    return values


def read_argument(settings: Settings, arg: str) -> dict:
    """{name: value} of one command-line argument. --name alone is --name=True."""
    if not arg.startswith("--"):
        return read_preset(settings, arg)
    name, equals, text = arg[2:].partition("=")
    if not equals and name in settings and not isinstance(settings[name].default, bool):
        raise ValueError(f"{arg} has no value; write {arg}=VALUE; {settings[name].comment}")
    return {name: check(settings, name, text if equals else True)}


def check_used(settings: Settings, config: Config) -> None:
    """Raise ValueError for a setting that the others leave unused; reset one from the fallback."""
    for name, setting in settings.items():
        for key, rule in setting.only:
            if config[name] == setting.default or satisfies(config[key], rule.lstrip("= ")):
                continue
            if name in config.overrides:
                raise ValueError(
                    f"{name}={config[name]!r} would do nothing: only {key}{rule} uses it, and {key}={config[key]!r}"
                )
            config[name] = setting.default


def help_text(settings: Settings, globals_: dict, whole: bool) -> str:
    """Usage, the first two paragraphs of the docstring, then the settings, as wide as the terminal."""
    script = Path(globals_["__file__"]).stem
    lines = [
        f"usage: python3 -m scripts.{script} [preset.py ...] [--key=value ...]    (later wins)",
        *globals_["__doc__"].split("\n\n")[:2],
        "\nsettings, with default and type; accepted values, if limited, a colon, the meaning:",
    ]
    width = shutil.get_terminal_size().columns
    for number, (name, s) in enumerate(settings.items()):
        if s.heading:
            if "What everybody touches" in lines and not whole:
                lines.append(f"\n--help=all: {len(settings) - number} more settings")
                break
            lines += ["", *s.heading]
        option = f"--{name}={s.default}"
        text = f"  {option:<28} {type(s.default).__name__:<5} {s.comment}"
        lines += textwrap.wrap(text, width, subsequent_indent=" " * 37, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines)


def configure(globals_: dict, argv: list[str] | None = None, fallback=None, modules=()) -> Config:
    """Override the calling script's settings in place, in its globals(); return them all, with those of `modules`.

    `fallback(config)`: {name: value} instead of defaults where nothing was given; may raise ValueError.
    --help exits with 0; a mistake prints one line, exits with 2 and changes nothing. Only rank 0 prints.
    """
    settings = read_settings(globals_, modules)
    if argv is None:
        argv = sys.argv[1:]
    is_first = os.environ.get("RANK", "0") == "0"
    if {"--help", "--help=all", "-h"} & {*argv}:
        try:
            if is_first:
                print(help_text(settings, globals_, "--help=all" in argv), flush=True)
        except BrokenPipeError:  # --help | head
            sys.stdout = open(os.devnull, "w")
        sys.exit(0)
    config = Config({name: setting.default for name, setting in settings.items()})
    config.defaults = dict(config)
    config.overrides = {}
    try:
        if sys.getfilesystemencoding() != "utf-8":  # names of files and classes would be stored garbled
            raise ValueError(
                f"this locale reads names as {sys.getfilesystemencoding()}; accepted: utf-8, such as by PYTHONUTF8=1"
            )
        typed_names = set()  # on the command line; that it replaces a preset's is no surprise
        for arg in argv:
            values = read_argument(settings, arg)
            for name in typed_names & values.keys():
                if is_first:
                    print(f"{name} is given again by {arg}: the last one counts")
            if arg.startswith("--"):
                typed_names |= values.keys()
            config.overrides |= values
        config |= config.overrides
        if fallback:
            config |= fallback(config) | config.overrides
        check_used(settings, config)
    except ValueError as error:
        if is_first:
            print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    globals_ |= config
    return config
