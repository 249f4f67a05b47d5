"""The house: arrows go one way, run time needs four packages, and README shows the loop as it is."""

import ast
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections import Counter

from conftest import ROOT

FLOORS = "ground, models diffusion, data training, prepare, sampling, metrics, formats, web, scripts".split(", ")
RUNTIME = set(sys.stdlib_module_names) | {"torch", "numpy", "wandb", "nanodiff", "configurator"}
SOURCES = sorted(
    [
        *ROOT.glob("nanodiff/**/*.py"),
        *ROOT.glob("scripts/*.py"),
        ROOT / "configurator.py",
    ]
)


def file_of(module):
    return ROOT / f"{module.replace('.', '/')}.py"


def imports(path):
    """(module, line of the import is indented) of every import in a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if file_of(inner) in SOURCES else node.module, node.col_offset > 0
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.col_offset > 0


def room(module):
    parts = module.split(".")
    if parts[0] == "scripts":
        return "scripts"
    return parts[1] if len(parts) > 2 or (ROOT / "nanodiff" / parts[-1]).is_dir() else "ground"


def floor(module):
    return next(i for i, rooms in enumerate(FLOORS) if room(module) in rooms.split())


def test_imports_go_down_or_stay_in_their_room_and_make_no_circle():
    climbing = []
    graph = {}
    for path in SOURCES:
        own = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        graph[own] = {module for module, _ in imports(path) if module.startswith("nanodiff.")}
        for module in graph[own] if own != "nanodiff" else ():  # the front door
            if floor(module) > floor(own) or (floor(module) == floor(own) and room(module) != room(own)):
                climbing.append(f"{own} -> {module}")
    assert not climbing
    while leaves := [module for module, needs in graph.items() if not needs & graph.keys()]:
        for leaf in leaves:
            del graph[leaf]
    assert not graph


def test_a_plain_run_opens_only_the_rooms_that_it_uses():
    """What base_train imports before it asks for a feature: half of the house, and no door stands open."""
    opened = set()
    waiting = ["scripts.base_train"]
    while waiting:
        path = file_of(waiting.pop())
        if path in SOURCES and path not in opened:
            opened.add(path)
            waiting += [module for module, indented in imports(path) if not indented]
    names = " ".join(path.relative_to(ROOT).as_posix() for path in opened)
    asked_for = r"\w+/(?:formats|metrics|prepare|web)/\S+|\w+/data/latents\S+"
    assert not re.findall(asked_for + r"|\w+/models/(?:autoencoder|lora)\S+|\w+/sampling/(?:given|inputs)\S+", names)
    assert len(opened) <= 36
    kinds = (tokenize.NAME, tokenize.NUMBER, tokenize.OP, tokenize.STRING)
    streams = (tokenize.generate_tokens(io.StringIO(path.read_text()).readline) for path in opened)
    assert sum(token.type in kinds for stream in streams for token in stream) <= 46_000


FUNCTION_WORDS = set(
    """where theirs own others ours mine of at what like how why who whose which these those else other this that it
    its they them their here there then than so such as by for from in into on onto over to with within without beside
    before after""".split()
)
PARTICIPLE = re.compile(
    r"[a-z]{3,}ed|given|known|found|told|drawn|taken|shown|kept|sent|seen|left|held|made|chosen|written|meant|built"
)
NOT_BARE = set("hidden compiled enabled fixed seed embed speed shared fused unused feed need indeed".split())


def bindings(path):
    """(name, line) of every assigned name, attribute and parameter in a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno


def test_names_are_nouns():
    """No function word; of bare participles 2% at most, about as many as the best codebases of the field have."""
    names = []
    words = []
    for path in SOURCES:
        for name, line in bindings(path):
            names.append(name)
            if name in FUNCTION_WORDS:
                words.append(f"{path.relative_to(ROOT)}:{line}: {name}")
    assert not words
    participles = [name for name in names if PARTICIPLE.fullmatch(name) and name not in NOT_BARE]
    assert len(participles) <= 0.02 * len(names), Counter(participles).most_common(20)


def test_run_time_packages():
    for path in SOURCES:
        for module, indented in imports(path):
            name = module.split(".")[0]
            known = name in RUNTIME or (name == "PIL" and indented) or path.parent.name == name
            assert known, f"{path} imports {module}"
            assert name != "wandb" or indented, f"{path} imports wandb where it may not be wanted"


def test_what_is_installed_is_all_that_runs_need():
    """Every package, and the files that the program finds beside its modules."""
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    rooms = {path.parent for path in SOURCES if path.parent != ROOT}
    assert {*setuptools["packages"]} >= {".".join(room.relative_to(ROOT).parts) for room in rooms}
    assert all((ROOT / name.replace(".", "/")).is_dir() for name in setuptools["packages"])  # else pip fails
    installed = set(SOURCES).union(*(ROOT.glob(f"{name.replace('.', '/')}/*.py") for name in setuptools["packages"]))
    for name, patterns in setuptools["package-data"].items():
        for pattern in patterns:
            installed |= {*(ROOT / name.replace(".", "/")).glob(pattern)}
    for path in [
        *ROOT.glob("nanodiff/**/*.html"),
        *ROOT.glob("runs/*.py"),
        *ROOT.glob("runs/*/*.safetensors"),
    ]:
        assert path in installed


def test_the_readme_shows_the_loop_as_it_is():
    """README's heart is Python; each line of a part of it is one of flow.py, in its order."""
    readme = (ROOT / "README.md").read_text()
    (heart,) = re.findall(r"```py\n(.*?)```", readme, re.S)
    ast.parse(heart)
    source = (ROOT / re.search(r"\[`flow.py`\]\((.*?)\)", readme)[1]).read_text()
    shown = 0
    for part in heart.split("\n\n\n"):
        _, *lines = map(str.strip, part.splitlines())
        rest = iter([line.split("  #")[0].strip() for line in source.splitlines()])
        assert [line for line in lines if line.split("  #")[0] not in rest] == []  # `in` moves the iterator on
        shown += len(lines)
    assert shown >= 6


def test_the_readme_is_read_in_four_minutes():
    readme = (ROOT / "README.md").read_text()
    guide = (ROOT / "runs" / "GUIDE.md").read_text()
    assert len(readme.splitlines()) <= 100
    assert len(readme.split()) <= 850
    assert len(guide.splitlines()) <= 250


def test_the_readme_says_how_much_there_is_to_read():
    readme = (ROOT / "README.md").read_text()
    core = re.findall(r"\[`[a-z_]+\.py`\]\((.*?)\)", readme)
    assert len(core) == 3
    count = sum(len((ROOT / path).read_text().splitlines()) for path in core)
    assert f"Its core is three files, {round(count, -2):,} lines," in " ".join(readme.split())


def test_links_between_pages_resolve():
    """Of README and runs/*.md: the file is there, and so is the heading or the anchor behind the "#"."""
    for page in [ROOT / "README.md", *ROOT.glob("runs/*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text()):
            file, _, anchor = target.partition("#")
            file = page.parent / file if file else page
            assert file.exists(), f"{page.name}: {target}"
            if anchor:
                titles = re.findall(r"^#+ (?:<.*>)?(.*)", file.read_text(), re.M)
                anchors = {re.sub(r"[^\w\- ]", "", title).lower().replace(" ", "-") for title in titles}
                assert anchor in anchors or f'<a id="{anchor}">' in file.read_text(), f"{page.name}: {target}"


def test_a_script_also_runs_as_a_file(tmp_path):
    """As users of DiT and improved-diffusion type it, from any folder."""
    file = [sys.executable, ROOT / "scripts" / "export.py", "--help"]
    done = subprocess.run(file, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--form" in done.stdout, done.stderr
