"""A script's settings: the assignments at its top, overridden by presets and the command line.

    depth = 12                        # >= 1: layers; the one dial of model size
    dtype = "auto"                    # auto|bfloat16|float16|float32: dtype of the matrix products
    sampler = "auto"                  # auto|{SAMPLERS}: {SAMPLERS} stands for the names in the script's table SAMPLERS
    #                                   a comment continues on lines starting with "#" and three spaces
    # Only arch=unet                    a heading; "Only" refuses the settings below it where they do nothing; it
    #                                   takes a comparison, too: Only lora_rank > 0
    dropout = 0.0                     # [0, 1): dropout rate
    config = configure(globals())

Then `python -m scripts.base_train [preset.py ...] [--key=value ...]`: later wins, --help lists everything.
The trailing comment is both the help and the check. It may begin with a rule, which ends at ": " or the line's end:
alternatives separated by "|" or " or ", each a comparison (`>= 1`), an interval (`[0, 1)`) or a plain value
(`auto`, `-1`, `""`).

A preset is a file of literal assignments (`depth = 12`), parsed and never executed. In it a tuple or a list stands for
a comma string: (0.99, 0.999) is "0.99,0.999". A mistake prints one line, "error: ...", and exits with code 2.
"""

import ast
import difflib
import io
import operator
import os
import re
import shutil
import sys
import textwrap
import tokenize
from contextlib import suppress
from numbers import Real
from pathlib import Path
from typing import NamedTuple

KINDS = {"bool": "True or False", "int": "an integer", "float": "a finite number", "str": "a string"}
WORDS = {"True": True, "true": True, "False": False, "false": False}

COMPARE = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
COMPARE |= {"[": operator.ge, "(": operator.gt, "]": operator.le, ")": operator.lt}
NUMBER = r"-?[\d.]+(?:e[+-]?\d+)?"
PART = rf'(?:[<>]=? ?{NUMBER}|[\[(]{NUMBER}, ?{NUMBER}[\])]|[\w.+-]+|"")'
RULE = re.compile(rf"(?=[^:]*[|<>\[(])({PART}(?:(?:\|| or ){PART})*)(?:: |:?$)")  # a lone word is prose: "name: ..."
ONLY = re.compile(r"Only (\w+)(?:=([\w|]+)| ([<>]=? \d+))")


class Setting(NamedTuple):
    default: bool | int | float | str
    kind: str  # a key of KINDS
    rule: str  # "" if the comment starts with none
    comment: list[str]  # its lines
    heading: list[str]  # lines of comment above the setting
    only: tuple[str, str] | None  # ("arch", "unet|dit") or ("rank", "> 0"): used only with such values of that setting

    @property
    def accepted(self) -> str:
        return f"{KINDS[self.kind]}, {self.rule}" if self.rule else KINDS[self.kind]


def find_rule(comment: str) -> str:
    """The rule that a comment begins with, or ""."""
    match = RULE.match(comment)
    assert match or not comment.startswith((">", "<", "[")), f"cannot read the rule of the comment {comment!r}"
    return match[1] if match else ""


def satisfies(value, rule: str) -> bool:
    """Whether a value of the right type meets any part of a rule."""
    return any(satisfies_part(value, part) for part in re.split(r"\|| or ", rule))


def satisfies_part(value, part: str) -> bool:
    signs = re.findall(r"[<>]=?|[\[\]()]", part)
    if not signs:  # a plain value
        return value == (part.strip('"') if isinstance(value, str) else literal(part))
    number = literal(str(value))
    if type(number) not in (int, float):
        return False
    bounds = [float(text) for text in re.findall(NUMBER, part)]
    return all(COMPARE[sign](number, bound) for sign, bound in zip(signs, bounds))


def literal(text: str):
    """Command-line text of a setting that is not a string -> bool, int, float, or unchanged."""
    if text in WORDS:
        return WORDS[text]
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def cast(kind: str, value):
    """Convert to the setting's type; None if that would lose information or be a guess."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if kind == "bool":
        return bool(value) if isinstance(value, bool) or (is_number and value in (0, 1)) else None
    if kind == "int":  # 1e6 is an integer, 1.5 and inf are not
        return int(value) if is_number and value % 1 == 0 and abs(value) < 2**63 else None
    if kind == "float":  # false for inf, nan and 10**400
        return float(value) if is_number and abs(value) <= sys.float_info.max else None
    if isinstance(value, list | tuple):  # flat: a comma string cannot nest
        items = [None if isinstance(item, list | tuple) else cast("str", item) for item in value]
        return None if None in items else ",".join(items)
    return str(value) if is_number or isinstance(value, str | Path) else None


def check(name: str, setting: Setting, value, where: str = ""):
    """The value that the setting gets. Raises ValueError with the line for the user."""
    result = cast(setting.kind, value)
    if result is None or (setting.rule and not satisfies(result, setting.rule)):
        raise ValueError(f"{where}{name}={value!r} is not accepted; accepted: {setting.accepted}")
    return result


class Config(dict):
    """{name: value} of all settings; `defaults` has the same names, `given` those from presets and the command line."""

    defaults: dict
    given: dict


def read_settings(globals_: dict) -> dict[str, Setting]:
    """The settings of the calling script in file order: its plain assignments up to the call of configure."""
    source = Path(globals_["__file__"]).read_text(encoding="utf-8")
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    table = lambda match: "|".join(globals_[match[1]])  # {SAMPLERS} -> euler|heun|...
    comments = {t.start[0]: re.sub(r"\{(\w+)\}", table, t.string) for t in tokens if t.type == tokenize.COMMENT}
    settings = {}
    last_row = 0
    only = None
    for node in ast.parse(source).body:
        if any(isinstance(n, ast.Name) and n.id == "configure" for n in ast.walk(node)):
            break
        above, last_row = range(last_row + 1, node.lineno), node.end_lineno
        if not isinstance(node, ast.Assign):
            continue
        name = ast.unparse(node.targets[0])
        default = globals_.get(name, ...)  # tuples, attributes and items are not in it
        if name.startswith("_") or not isinstance(default, bool | int | float | str):
            continue
        kind = type(default).__name__
        comment = [comments.get(last_row, "").strip("# ")]
        while comments.get(last_row + 1, "").startswith("#   "):
            last_row += 1
            comment.append(comments[last_row].strip("# "))
        heading = []
        for row in above:  # to the last row without a comment, comments are for readers of the source
            heading = [*heading, comments[row].strip("#-= ")] if row in comments else []
        heading = [line for line in heading if line]
        if heading:
            condition = ONLY.search(" ".join(heading))
            only = condition and (condition[1], condition[2] or condition[3])
        settings[name] = Setting(default, kind, find_rule(comment[0]), comment, heading, only)
        check(name, settings[name], default, "default: ")
    return settings


def lookup(settings: dict[str, Setting], name: str, where: str = "") -> Setting:
    """The setting of that name. Raises ValueError with the nearest names."""
    if name not in settings:
        near = difflib.get_close_matches(name.replace("-", "_"), settings, n=3, cutoff=0.5) or ["none (see --help)"]
        raise ValueError(f"{where}unknown setting {name!r}; nearest: {', '.join(near)}")
    return settings[name]


def read_preset(settings: dict[str, Setting], path: str) -> dict:
    """{name: value} of a preset's assignments. Raises ValueError naming the file and the line."""
    found = [p for p in (Path(path), Path(__file__).parent / path) if os.path.isfile(p)]  # False for overlong names
    if not found:
        raise ValueError(f"preset {path!r} not found, here or in the repository")
    values = {}
    try:
        nodes = ast.parse(found[0].read_bytes(), path).body
    except (SyntaxError, ValueError, OSError) as error:
        raise ValueError(f"preset {path!r}: {error}") from None
    for node in nodes:
        where = f"preset {path!r} line {node.lineno}: "
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            continue  # a docstring
        try:
            (target,) = node.targets
            name, value = target.id, ast.literal_eval(node.value)
        except (AttributeError, ValueError, TypeError):
            raise ValueError(f"{where}only assignments of literals are accepted, such as depth = 12") from None
        values[name] = check(name, lookup(settings, name, where), value, where)
    return values


def read_argument(settings: dict[str, Setting], arg: str) -> dict:
    """{name: value} of one argument of the command line."""
    if not arg.startswith("-") and arg.endswith(".py"):
        return read_preset(settings, arg)
    if not arg.startswith("--"):
        raise ValueError(f"argument {arg!r} is not accepted; accepted: --key=value, or a preset that ends in .py")
    name, equals, text = arg[2:].partition("=")
    setting = lookup(settings, name)
    if not equals and setting.kind != "bool":
        raise ValueError(f"--{name} needs a value, --{name}=...; accepted: {setting.accepted}")
    value = text if setting.kind == "str" else literal(text)
    return {name: check(name, setting, value if equals else True)}


def check_used(settings: dict[str, Setting], config: Config) -> None:
    """Raises ValueError for a changed setting that does nothing, given the others; an inherited one is reset."""
    for name, setting in settings.items():
        if not setting.only or config[name] == setting.default:
            continue
        key, rule = setting.only
        if satisfies(config[key], rule):
            continue
        if name in config.given:
            condition = f"{key} {rule}" if rule[0] in COMPARE else f"{key}={rule}"
            used = f"only {condition} uses it, and {key}={config[key]!r}"
            raise ValueError(f"{name}={config[name]!r} would do nothing: {used}")
        config[name] = setting.default


def help_text(settings: dict[str, Setting], globals_: dict) -> str:
    """Usage, and three examples: the docstring's second paragraph. Then the settings, as wide as the terminal."""
    script = f"-m {globals_['__spec__'].name}" if globals_.get("__spec__") else globals_["__file__"]
    title, *more = globals_["__doc__"].strip().split("\n\n")
    lines = [f"usage: python {script} [preset.py ...] [--key=value ...]    (later wins)", "", title]
    for examples in more[:1]:
        lines += ["", *examples.splitlines()[:3]]
    lines += ["", "settings, with default and type; accepted values, if limited, a colon, the meaning:"]
    for name, s in settings.items():
        lines += ["", *s.heading] if s.heading else []
        text = " ".join([f"  {f'--{name}={s.default}':<28} {s.kind:<5}", *s.comment])
        lines.append(textwrap.fill(text, shutil.get_terminal_size().columns, subsequent_indent=" " * 37))
    return "\n".join(lines)


def configure(globals_: dict, argv: list[str] | None = None, inherited=None) -> Config:
    """Override the calling script's settings in place, in its globals(); return them all.

    `inherited(config)`: {name: value} that stand in for defaults where nothing was given, or a ValueError.
    --help exits with 0; a mistake prints one line, exits with 2 and changes nothing. Only rank 0 prints.
    """
    settings = read_settings(globals_)
    argv = sys.argv[1:] if argv is None else argv
    show = print if os.environ.get("RANK", "0") == "0" else lambda *args, **kwargs: None
    if "--help" in argv or "-h" in argv:
        try:
            show(help_text(settings, globals_), flush=True)
        except BrokenPipeError:  # --help | head
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    config = Config({name: setting.default for name, setting in settings.items()})
    config.defaults, config.given = dict(config), {}
    try:
        for arg in argv:
            config.given |= read_argument(settings, arg)
        config.update(config.given)
        if inherited:
            config.update(inherited(config) | config.given)
        check_used(settings, config)
    except ValueError as error:
        show(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
    globals_.update(config)
    return config
