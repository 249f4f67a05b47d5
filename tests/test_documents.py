"""README and the guide tell the truth: every command is accepted, and what needs neither GPU nor network runs."""

import inspect
import json
import re
import shlex
import shutil
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT, script_settings
from image_helpers import archive, make_folder
from PIL import Image
from tiny_runs import PLAIN, TIMELESS, make_autoencoder, make_data, randomise

import nanodiff
from nanodiff.data import shapes
from nanodiff.diffusion import flow
from nanodiff.formats.published import to_meta
from nanodiff.metrics import classifier, features
from nanodiff.models.dit import DiT, DiTConfig
from nanodiff.prepare import sources
from nanodiff.safetensors import load_safetensors

RUNS = ROOT / "runs"
PAGES = [ROOT / "README.md", RUNS / "GUIDE.md"]
DOCUMENTS = [
    *PAGES,
    *sorted(RUNS.glob("*.sh")),
    *sorted(set(RUNS.glob("*.md")) - set(PAGES)),
]
SCRIPTS = "|".join(path.stem for path in (ROOT / "scripts").glob("*.py"))


def commands(text, short=False):
    """[(script, [argument, ...])] of the commands in a text, in its order; `short`: `base_train --flip`, too."""
    start = r"(?:-m scripts\.|`)" if short else r"-m scripts\."
    found = re.finditer(rf"{start}({SCRIPTS})(?![\w.])([^`\n|>)]*)", text.replace("\\\n", " "))
    return [(match[1], [arg for arg in shlex.split(match[2], comments=True) if arg != "--"]) for match in found]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_the_commands_that_we_tell_users_are_accepted(path):
    """Scripts, presets, names and values."""
    for script, args in commands(path.read_text(), short=path in PAGES):
        if script == "report":  # takes no settings
            continue
        settings = [arg for arg in args if arg.startswith("--") or arg.endswith(".py")]
        settings = [arg for arg in settings if "$" not in arg and "..." not in arg]
        config = script_settings(script, *settings)
        for arg in settings:
            if arg.startswith("--"):
                name = arg[2:].partition("=")[0]
                assert name in config, (script, args)
    for story in re.findall(r"bash (runs/\w+\.sh)", path.read_text()):
        assert (ROOT / story).is_file()


TRAIN = ["--num_iterations=1", "--total_batch_size=4", "--eval_every=0", "--eval_images=4", "--sample_steps=1", *PLAIN]
SMALLER = {  # what is appended to a command
    "prepare_data": ["--workers=1", "--overwrite"],
    "cache_latents": ["--device_type=cpu", "--overwrite"],
    "sample": ["--num_images=4", *TIMELESS],
    "base_eval": ["--num_images=12", *TIMELESS],
}
STAND_INS = {
    "RUN": "mine_dit_d4",
    "RUN_A": "mine_dit_d4",
    "RUN_B": "shapes_cpu",
    "RUN_OR_FILE": "mine_dit_d4",
    "NAME": "dummy",
}
NOT_RUN = {
    # measures for minutes, serves until it is stopped (both have tests of their own), downloads
    "bench",
    "plan",
    "plan --data=mine --minutes=60",
    "sample_web",
    "sample_web --model=runs/weights/cifar10.safetensors",
    "base_train --fid_every=5000",
    "prepare_data --path=CIFAR-10-images --name=cifar10",
    # words in a text, to be completed by a path, a run or a set
    "prepare_data",
    "prepare_data --path=FOLDER",
    "prepare_data --labels=none",
    "prepare_data --vectors=FILE.npz",
    "prepare_data --pairs=MASKS",
    "sample",
    "sample --npz",
    "cache_latents --autoencoder=PATH",
    "base_train --init_from=FILE",
    "base_train --objective=flow_map",
    "base_eval --metric=fid",
}


class Words:
    """In place of Hugging Face's libraries: a tokenizer and an encoder of text, a set of images."""

    CLIPTokenizer = CLIPTextModel = property(lambda self: self)
    from_pretrained = lambda self, name: self
    keys = lambda self: ()  # of no tokens
    __call__ = lambda self, *text, **options: self if text else torch.ones(1, 1, 5, 768)

    def load_dataset(self, *args, **options):
        image = Image.new("RGB", (20, 30))
        return [{"image": image, "label": i % 2} for i in range(40)]


@pytest.fixture
def place(base, monkeypatch):
    """The current folder, with the files of which the pages speak."""
    monkeypatch.chdir(base)
    monkeypatch.setattr(shapes, "NUM_IMAGES", {"train": 64, "val": 24})
    monkeypatch.setattr(classifier, "MIN_TRAINED", 100)
    network = classifier.Classifier(3, 32, 8, width=4).requires_grad_(False).eval()
    monkeypatch.setattr(features, "load_inception", lambda *_: network)
    for library in ("datasets", "transformers"):
        monkeypatch.setitem(sys.modules, library, Words())
    make_data("cifar10", resolution=32, class_names=sources.CIFAR10_CLASSES)  # the sets of which the presets speak
    make_data("mnist", resolution=28)
    for file in make_folder(base / "FOLDER", sizes=((20, 30), (30, 20)), per_class=6):
        (base / "FOLDER" / file).with_suffix(".txt").write_text("a caption")
    make_folder(base / "MASKS", sizes=((20, 30), (30, 20)), per_class=6)
    (base / "runs").mkdir(exist_ok=True)
    for folder in ("weights", "records"):
        (base / "runs" / folder).symlink_to(RUNS / folder)
    (base / "shards").mkdir()
    archive(base / "FOLDER", "tar", base / "shards" / "0.tar")
    np.save("scans.npy", np.arange(20 * 64.0).reshape(20, 8, 8))
    np.save("asked.npy", np.ones((4, 32, 768), np.float32))
    for file in ("FILE.png", "MASK.png"):
        Image.fromarray(np.eye(32, dtype=np.uint8) * 255).save(file)
    rng = np.random.default_rng(0)
    np.savez("FILE.npz", rng.integers(0, 256, (64, 32, 32, 3), np.uint8))
    np.savez("base_samples.npz", np.zeros((4, 8, 8, 3), np.uint8))
    vectors = rng.normal(size=(40, 151))
    for name in "AB":
        np.save(f"{name}.npy", vectors)
    make_autoencoder(base / "PATH", latent_channels=4)
    config = DiTConfig(64, 4, 8, 8, 384, 1, 6, num_classes=5, block="classic")
    for name in ("SiT", "DiT"):
        torch.save(to_meta(randomise(DiT(config).state_dict()), config), f"{name}-XL-2-256x256.pt")
    return base


@pytest.mark.slow
def test_the_pages_run_from_top_to_bottom(place, run_script):
    """Each command as it stands, and behind it settings that make it small."""
    examples = []

    def run(script, *args, is_example=False):
        command = " ".join([script, *args])
        if command in NOT_RUN:
            return
        given = dict(arg[2:].partition("=")[::2] for arg in args if arg.startswith("--"))
        for preset in RUNS.glob(f"{given.get('model')}.py"):  # of which a page says only the name
            shipped = RUNS / "weights" / f"{preset.stem}.safetensors"
            if not (place / "runs" / preset.stem).exists() and not shipped.exists():
                run("base_train", f"runs/{preset.name}")
        more = [*SMALLER.get(script, [])]
        if "steps" in given and script == "base_eval":
            more.append("--steps=1,2")
        if "XL" in given.get("model", ""):  # 250 steps
            more.append("--steps=3")
        if script == "base_train":
            settings = script_settings(script, *args)
            more = [*TRAIN]
            if settings["arch"] == "unet":
                more += ["--depth=1", "--num_res_blocks=1"]
            elif ".pt" not in given.get("init_from", ""):
                more.append("--width=64")
            if settings["objective"] == "eps":
                more.append("--num_timesteps=5")
            if (is_example or "init_from" in given) and "model_tag" not in given:  # they stand side by side
                examples.append(command)
                more += [f"--model_tag=example{len(examples)}"]
        words = [re.sub(r"(?<==)\w+|^\w+$", lambda word: STAND_INS.get(word[0], word[0]), arg) for arg in args]
        try:
            run_script(script, *words, *more)
        except BaseException as error:
            if not (isinstance(error, SystemExit) and error.code is None):  # an early end
                error.add_note(f"in {command}")
                raise
        for adapters in place.glob("runs/*/adapters/*"):
            shutil.copy(adapters, "FILE.safetensors")

    for page in PAGES:
        for language, block, inline in re.findall(r"```(\w*)\n(.*?)```|(`[^`\n]+`)", page.read_text(), re.S):
            if language == "python":
                exec(block, {})
            for script, args in commands(block or inline, short=bool(inline)):
                run(script, *args, is_example=bool(inline))


LOGGED = {  # what a log in runs/records says of each of its trainings
    "steps": r"^([\d,]+) steps (?:in|at rate) ",
    "minutes": r"steps in ([\d.]+) minutes of training",
    "seconds": r": (\d+) s of at most",
    "samples": r"^([\d,]+) samples \(|^ *num_images +(\d+)$",
    "distance": r"\bfd_classifier +([\d.]+)",
    "precision": r"\bprecision +([\d.]+)",
    "recall": r"\brecall +([\d.]+)",
}
STATED = [  # a column's title; the figure that its cells state; its decimals
    ("steps", "steps", 0),
    ("recipe", "steps", 0),
    ("CIFAR-10, two Xeon cores", "minutes", 1),
    ("minutes of training", "minutes", 1),
    ("minutes", "clock", 1),
    ("seconds, longest", "longest", 0),
    ("samples", "samples", 0),
    ("fd_classifier", "distance", 2),
    ("score", "score", 2),
    ("guided in sampling by 1.5 in 0.3 to 0.7", "score", 2),
    ("precision", "precision", 3),
    ("recall", "recall", 3),
]


def read_log(path):
    """{name: the figures of a log, one a training}; score: the distance, of guided samples if there are any."""
    text = re.sub(r"^fd_simclr.*\n", "", path.read_text(), flags=re.M)
    plain, *guided = text.split("the same, guided by")
    figures = {}
    for name, pattern in LOGGED.items():
        matches = re.finditer(pattern, plain, re.M)
        figures[name] = [float(match[match.lastindex].replace(",", "")) for match in matches]
    figures["longest"] = [max(figures["seconds"])] if figures["seconds"] else []
    figures["clock"] = [np.mean(figures["seconds"]) / 60] if figures["seconds"] else []
    last = guided[0] if guided else plain
    figures["score"] = [float(value) for value in re.findall(LOGGED["distance"], last)]
    return figures


def spellings(values, decimals):
    """How a cell may state figures: as their mean, with or without the deviation, or their range."""
    spell = lambda value: f"{value:,.{decimals}f}"
    low = spell(np.min(values))
    mean = spell(np.mean(values))
    high = spell(np.max(values))
    if low == high:
        return [mean]
    deviation = np.std(values, ddof=1)
    return [f"{low} to {high}", f"{mean} ± {deviation:.{decimals}f}", mean]


def logged_rows(page):
    """(path of the log, {title: cell}) of each row of a page's tables that links to a log in runs/records."""
    for table in re.findall(r"(?:^\|.*\n)+", page.read_text(), re.M):
        cells_of = lambda line: [cell.strip(" *") for cell in line.split("|")[1:-1]]
        titles, _, *rows = map(cells_of, table.splitlines())
        for row in rows:
            for name in re.findall(r"records/(\w[\w.-]*\.txt)\)", str(row)):
                yield RUNS / "records" / name, dict(zip(titles, row, strict=True))


ROWS = [*logged_rows(ROOT / "README.md"), *logged_rows(RUNS / "RECORDS.md")]


@pytest.mark.parametrize("path, row", ROWS, ids=[path.stem for path, _ in ROWS])
def test_a_row_says_what_the_log_says_to_which_it_links(path, row):
    figures = read_log(path)
    stated = [column for column in STATED if column[0] in row]
    assert len(stated) >= (1 if "score" in row or path.stem.startswith("cifar10_d") else 2)
    for title, name, decimals in stated:
        cell = row[title].replace("*", "")
        if not figures[name]:
            assert not re.search(r"\d", cell), f"{name}: {cell}"
            continue
        words = spellings(figures[name], decimals) + spellings(figures[name], max(decimals - 1, 0))
        patterns = [rf"(?<![\d.,]){re.escape(word)}(?![\d.]| ±)" for word in words]
        assert re.search("|".join(patterns), cell), (name, words)
    device = re.search(r"^device: 1 x (?:NVIDIA )?(\w+)", path.read_text(), re.M)
    machine = row.get("machine") or row.get("card")
    if device and machine:
        assert device[1].lower() in machine.lower()
    for count, seeds in (
        ("one seed", 1),
        ("three seeds", 3),
    ):
        if count in str(row):
            assert len(figures["distance"]) == seeds


def test_the_headlines_have_logs():
    """At least the first rows of README, and of each track and the race."""
    pages = {path.name for path, _ in ROWS}
    for name in ("gpu_e0c6c21", "cpu_1c4e837", "cpu_5b872ed", "minRF_4fc10e0"):
        assert f"{name}.txt" in pages
    assert len(ROWS) >= 12
    assert len(ROWS) == len({*map(str, ROWS)})
    readme = (ROOT / "README.md").read_text()
    record = spellings(read_log(RUNS / "records" / "cpu_1c4e837.txt")["score"], 2)
    assert f"| our record, within 20 minutes | [{record[1]}](runs/records/cpu_1c4e837.txt) (three seeds) |" in readme
    log = (RUNS / "records" / "cpu_1c4e837.txt").read_text()
    (real,) = {*re.findall(r"fd_classifier \S+ \(as many real images: (\S+)\)", log)}
    assert f"| unseen photos | {float(real):.2f} |" in readme
    guide = (RUNS / "GUIDE.md").read_text()
    for depth in (2, 3, 4):
        path = f"records/cifar10_d{depth}_3620c90.txt"
        (score,) = read_log(RUNS / path)["score"]
        assert f"[{score:.2f}]({path})" in guide


def test_the_readmes_change_of_a_sampler_draws_mirrored_images(monkeypatch):
    header, added = re.search(r"```diff\n(.*?)```", (ROOT / "README.md").read_text(), re.S)[1].splitlines()
    source = inspect.getsource(flow.euler)
    assert source.startswith(header[1:])
    scope = {**vars(flow)}
    exec(source.replace(header[1:], f"{header[1:]}\n{added[1:]}"), scope)
    model = nanodiff.load(RUNS / "weights" / "cifar10.safetensors")
    settings = dict(classes=["automobile", "ship"], num_images=2, sampler="euler", steps=5)
    plain = model.sample(**settings).astype(int)
    monkeypatch.setitem(flow.SAMPLERS, "euler", scope["euler"])
    mirrored = model.sample(**settings).astype(int)
    assert np.abs(mirrored - mirrored[:, :, ::-1]).mean() < 2  # the last step's velocity is not quite symmetric
    assert np.abs(plain - plain[:, :, ::-1]).mean() > 10
    assert mirrored.std() > 20


def dial(depth):
    """(parameters, images that training sees by default) of a depth on CIFAR-10: 12 tokens per parameter."""
    config = DiTConfig.from_depth(depth, 32, in_channels=3, out_channels=3, num_classes=10)
    with torch.device("meta"):
        model = DiT(config)
    num_params = sum(p.numel() for p in model.parameters())
    return num_params, 12 * num_params / config.num_tokens


def number(cell):
    """1,500,000 of "1.5M" """
    scale = {"M": 1e6, "B": 1e9}.get(cell[-1], 1)
    return scale * float(cell.rstrip("MB").replace(",", ""))


def test_the_dials_table_follows_from_the_dial_and_the_logs():
    readme = (ROOT / "README.md").read_text()
    (guide,) = re.findall(r"400 times at depths 2 to 4 \((.*?)\)", (RUNS / "GUIDE.md").read_text())
    image_counts = {depth: count for count, depth in re.findall(r"([\d,]+) for depth (\d)", readme)}
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", readme.split("<details>")[0], re.M)
    assert [depth for depth, _ in rows] == ["2", "3", "4"]
    for depth, row in rows:
        parameters, training = row.split(" | ")
        num_params, images = dial(int(depth))
        assert number(parameters) == pytest.approx(num_params, rel=0.05)
        assert number(image_counts[depth]) == pytest.approx(images / 400, rel=0.05)
        assert f"{depth}: {image_counts[depth]}" in guide
        log = (RUNS / "records" / re.search(r"records/(.*)\)", training)[1]).read_text()
        minutes = re.search(r"in (\S+) minutes of training", log)[1]
        assert f"[{float(minutes):.0f} minutes]" in training
        assert f"--depth={depth} --flip" in log
        assert f"dit d{depth}: {num_params:,} parameters" in log
        steps, batch = re.search(r"^run: ([\d,]+) steps .* x (\d+) images:", log, re.M).groups()
        assert int(steps.replace(",", "")) * int(batch) == pytest.approx(images, rel=0.01)
        assert "2 threads" in log


def test_the_table_of_a_gpu_follows_from_the_dial_and_the_log():
    log = (RUNS / "records" / "gpu_0028b2a.txt").read_text()
    readme = (ROOT / "README.md").read_text()
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", readme.split("<details>")[1], re.M)
    assert [depth for depth, _ in rows] == ["6", "12", "24"]
    for depth, row in rows:
        parameters, needed, cost, memory = row.split(" | ")
        num_params, images = dial(int(depth))
        assert number(parameters) == pytest.approx(num_params, rel=0.01)
        assert number(needed) == pytest.approx(images / 100, rel=0.01)
        speed, gib = re.search(rf"^depth {depth}, .* (\S+) images/s, MFU \S+ (\S+) GiB", log, re.M).groups()
        at_once = re.search(rf"^depth {depth}, (\d+) images(?: at once| as 2 x (\d+)):", log, re.M)
        minutes = images / number(speed) / 60
        value, unit, price = re.match(r"(\d+) (minute|hour)s?, (\$\d+|\d cents)", cost).groups()
        assert int(value) == round(minutes if unit == "minute" else minutes / 60)
        dollars = 3 * minutes / 60
        assert price in (f"${dollars:.0f}", f"{100 * dollars:.0f} cents")
        assert memory == f"{float(gib):.0f} GiB ({at_once[2] or at_once[1]})"


def test_the_readme_says_of_emoji_what_is_logged():
    readme = " ".join((ROOT / "README.md").read_text().split())
    emoji = (RUNS / "records" / "emoji_930b54f.txt").read_text()
    (minutes,) = re.findall(r"in (\S+) minutes of training", emoji)
    minutes = f"[{float(minutes):.0f} minutes](runs/records/emoji_930b54f.txt)"
    assert f"What can one Xeon core learn to draw in {minutes}?" in readme
    (num_images,) = re.findall(r"^data: emoji64: (\S+) \+", emoji, re.M)
    assert f"[`bash runs/emoji.sh`](runs/emoji.sh) trains this depth-4 model on {num_images} emoji" in readme


def test_the_cards_figures_are_those_in_the_shipped_files():
    card = (RUNS / "weights" / "README.md").read_text()
    for name in ("cifar10", "cifar10_map"):
        _, metadata = load_safetensors(RUNS / "weights" / f"{name}.safetensors")
        figures = json.loads(metadata["release"])["figures"]
        distance, allowed = figures["fd_classifier"]
        score = f"{distance:.2f} ± {(allowed - 0.01 * distance) / 3:.2f}"  # release.sh: three deviations and 1%
        (row,) = [line for line in card.splitlines() if line.startswith(f"| `{name}.safetensors`")]
        assert score in row
        assert f"{figures['precision'][0]:.3f}" in row
        assert f"{figures['recall'][0]:.3f}" in row
        if name == "cifar10":
            assert f"the shipped model {distance:.2f}." in (RUNS / "GUIDE.md").read_text()
            row = f"[seven hours](runs/weights/README.md) | {distance:.2f} |"
            assert row in (ROOT / "README.md").read_text()
            assert "Seven hours on\n  two cores" in card


def test_the_fid_is_the_logged_one():
    logged = re.findall(r"images: fid ([\d.]+)$", (RUNS / "records" / "fid_cifar10.txt").read_text(), re.M)
    model, real = map(float, logged)
    card = " ".join((RUNS / "weights" / "README.md").read_text().split())
    assert f"FID {model:.2f} (50,000 samples" in card
    assert f"test images {real:.2f} " in card


def test_pictures_show_the_first_samples_of_the_logged_runs():
    gpu = np.load(RUNS / "records" / "gpu_e0c6c21_seed42.npz")["arr_0"]
    cpu = np.load(RUNS / "records" / "cpu_1c4e837_seed1.npz")["arr_0"]
    vehicles = [10 * row + label for label in (0, 1, 8, 9) for row in range(3)]
    for name, left, top, side, rows in (
        ("cifar10_gpu.jpg", 2, 22, 64, gpu[:40].reshape(4, 10, 32, 32, 3)),
        ("record.jpg", 130, 24, 60, [cpu[vehicles], gpu[vehicles]]),
    ):
        with Image.open(RUNS / name) as picture:
            for y, row in enumerate(rows):
                for x, sample in enumerate(row):
                    corner = (left + x * (side + 2), top + y * (side + 2))
                    tile = picture.crop((*corner, corner[0] + side, corner[1] + side)).resize((32, 32))
                    assert np.abs(np.asarray(tile, np.float32) - sample).mean() < 8  # of 255: JPEG's


def test_entries_of_the_log_that_others_cite_are_there():
    """Code says "runs/LOG.md, 7 and 27"; pages link to LOG.md#27."""
    log = (RUNS / "LOG.md").read_text()
    entries = {*re.findall(r'id="(\d+)"', log), "index"}
    files = [
        *ROOT.glob("scripts/*.py"),
        *ROOT.glob("nanodiff/**/*.py"),
        *RUNS.glob("*.*"),
        ROOT / "README.md",
    ]
    for path in files:
        if path.suffix not in (".py", ".md", ".sh"):
            continue
        text = re.sub(r"\s+(# )?", " ", path.read_text())  # a comment of two lines
        for cited in re.findall(r"LOG\.md(?:#|, )(index|\d+(?:(?:, | to | and )\d+)*)", text):
            assert {*re.findall(r"index|\d+", cited)} <= entries, (path.name, cited)
    for cited in re.findall(r"\(#(\d+)\)", log):
        assert cited in entries
    rows = [line for line in log.splitlines() if line.startswith("|")]
    assert max(map(len, rows)) < 330  # one idea a row
    assert len(log.split()) <= 6000
