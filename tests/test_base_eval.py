"""A figure does not depend on how the work was cut up, and is kept beside the run."""

import json

import numpy as np
import pytest
import torch
from conftest import refused
from PIL import Image
from processes import on_ranks
from tiny_runs import PLAIN, TIMELESS, TINY, logged, make_data, make_run

from nanodiff.data.dataset import DatasetWriter, open_dataset
from nanodiff.data.pixels import to_model_range
from nanodiff.data.shapes import CLASS_NAMES, draw_shapes
from nanodiff.formats import load
from nanodiff.metrics import classifier, features
from nanodiff.safetensors import save_safetensors
from nanodiff.sampling.draw import ModelSamples


@pytest.fixture
def quick_classifier(monkeypatch):
    monkeypatch.setattr(classifier, "MIN_TRAINED", 200)


def evaluate(run_script, metric, *args):
    """What is written beside the run, or the samples."""
    done = run_script("base_eval", *TIMELESS, f"--metric={metric}", *args)
    return json.loads(done["path"].read_text())


def test_what_a_validation_loss_is_of(run_dir, run_script):
    """Of the weights that are asked for, all images, and noise by the seed. Of any batch size: two ranks, below."""
    one = evaluate(run_script, "loss")
    assert one["num_images"] == 24
    assert one["data"] == "tiny"
    assert one["step"] == 1
    assert one["weights"] == "0.999"
    assert evaluate(run_script, "loss", "--num_images=99") == one
    assert evaluate(run_script, "loss", "--ema=raw")["loss"] != one["loss"]
    assert evaluate(run_script, "loss", "--seed=1")["loss"] != one["loss"]
    images, labels = draw_shapes(24, seed=24)  # those of the validation split, with the classes in another order
    with DatasetWriter("turned", CLASS_NAMES[::-1]) as writer:
        for split in ("train", "val"):
            writer.append(split, images, y=7 - labels)
    assert evaluate(run_script, "loss", "--data=turned")["loss"] == one["loss"]  # other classes: tests/test_dataset.py
    # At step 0 the output is 0: under flow matching the loss is then E|noise - x0|^2 = 1 + E x0^2, whatever t
    of_nothing = evaluate(run_script, "loss", "--checkpoint_step=0")
    images = open_dataset("tiny", "val").images(range(24))
    x0 = to_model_range(torch.from_numpy(images))
    expected = 1 + float(x0.square().mean())
    deviation = (6 / x0.numel()) ** 0.5
    assert of_nothing["loss"] == pytest.approx(expected, abs=5 * deviation)
    assert of_nothing["loss_by_t"] == pytest.approx([of_nothing["loss"]] * 20, rel=0.2)


def test_the_figures_of_a_file_lie_where_its_samples_would(base, run_dir, run_script):
    file = base / "alone.safetensors"
    run_script("export", f"--out={file}")
    done = run_script("base_eval", *TIMELESS, "--metric=loss", f"--model={file}")
    assert done["path"].parent == base / "samples"


def test_validation_loss_does_not_depend_on_the_training_law_of_t(base, run_script):
    make_data()
    of_flow = ["--timestep_std=0.5", "--timestep_shift=3", "--timesteps=uniform"]
    for objective, settings in (
        ("flow", of_flow),
        ("eps", ["--timesteps=loss-second-moment"]),
    ):
        figures = []
        for i, setting in enumerate(["--timesteps=auto", *settings]):
            run_dir = make_run(run_script, f"{objective}{i}", f"--objective={objective}", setting)
            found = evaluate(run_script, "loss", f"--model={run_dir.name}")
            quarters = [found.get(f"loss_q{q}") for q in range(4)]
            figures.append([found["loss"], *quarters])
        assert figures[1:] == figures[:1] * len(settings)


def test_bits_per_dim(run_dir, run_script):
    one = evaluate(run_script, "bpd", "--num_images=3", "--model=eps")
    assert one["timesteps"] == 50
    assert one["num_images"] == 3
    assert 0 < one["prior_bpd"] < one["total_bpd"]
    for name in ("vb", "xstart_mse", "mse"):
        assert len(one[name]) == 50
    other = evaluate(run_script, "bpd", "--num_images=3", "--model=eps", "--seed=1")
    assert other["total_bpd"] != one["total_bpd"]
    assert sum(one["vb"]) + one["prior_bpd"] == pytest.approx(one["total_bpd"])


def test_well_formed_end_to_end(run_dir, run_script, monkeypatch, tmp_path):
    """A run's samples are not well formed, a file of real shapes with classes in another order is."""
    monkeypatch.setattr("nanodiff.data.dataset.SHAPES", {"tiny": 16})
    assert evaluate(run_script, "well_formed", "--num_images=8", "--steps=1")["well_formed"] == 0
    images, labels = draw_shapes(16, seed=3)
    protocol = json.dumps({"class_names": CLASS_NAMES[::-1]})
    np.savez(
        tmp_path / "s.npz",
        arr_0=images.transpose(0, 2, 3, 1),
        labels=7 - labels,
        protocol=protocol,
    )
    found = evaluate(run_script, "well_formed", f"--samples={tmp_path}/s.npz", "--data=tiny")
    assert found["well_formed"] >= 0.9
    assert found["real_images"]["well_formed"] >= 0.9


def write_npz(path, dataset):
    """The images of a set as a file of samples."""
    ids = range(len(dataset))
    images = dataset.images(ids).transpose(0, 2, 3, 1)
    np.savez(path, arr_0=images, labels=dataset.labels(ids))


FEW = ("--num_images=12", "--sampler=heun", "--steps=2", "--cfg_scale=3", "--seed=5")


def test_a_file_of_samples_has_the_figures_of_the_run_that_drew_it(run_dir, run_script, quick_classifier, tmp_path):
    few = (*FEW, "--cfg_interval=0.7,1")  # the first of three evaluations
    drawn = evaluate(run_script, "fd_classifier", *few)
    given = dict(
        num_images=12,
        steps=2,
        network_evaluations=4,
        sampler="heun",
        cfg_scale=3,
        seed=5,
        weights="0.999",
    )
    assert given.items() <= drawn.items()
    run_script("sample", *TIMELESS, *few, "--npz", f"--out={tmp_path}/s")
    figures = ["fd_classifier", "precision", "recall", "copies", "class_accuracy"]
    read = evaluate(run_script, "fd_classifier", f"--samples={tmp_path}/s.npz")  # it says which set it belongs to
    assert read["samples_protocol"]["seed"] == 5
    assert read["num_images"] == 12
    assert [path.name.split("_")[3] for path in tmp_path.glob("eval_*.json")] == ["s.npz"]  # a folder s has its own
    for figure in figures:
        assert read[figure] == drawn[figure]


def test_held_out_images_have_the_figures_of_the_real_images_beside_them(base, run_script, quick_classifier, tmp_path):
    make_data(train=30)
    write_npz(tmp_path / "s.npz", open_dataset("tiny", "val"))
    held_out = (f"--samples={tmp_path}/s.npz", "--data=tiny")
    judged = evaluate(run_script, "fd_classifier", *held_out)
    figures = ("num_images", "fd_classifier", "precision", "recall", "class_accuracy")
    for figure in figures:
        assert judged["real_images"][figure] == judged[figure]
    itself = evaluate(run_script, "fd_classifier", *held_out, "--reference_split=val")
    assert itself["fd_classifier"] < 1e-6
    assert judged["fd_classifier"] > 1e-6
    assert itself["precision"] == 1
    assert itself["recall"] == 1
    assert itself["copies"] == 1


def test_adapters_are_measured_on_their_own_set(base, run_dir, run_script, quick_classifier):
    """Which lacks most of the base's classes: it is drawn in its own proportions."""
    make_data("tuned", class_names=["star", "bar"], train=40, val=12)
    run_script("base_train", *PLAIN, *"--init_from=flow --data=tuned --lora_rank=2 --num_iterations=0".split())
    measured = evaluate(run_script, "fd_classifier", *FEW, "--model=flow_tuned_lora")
    assert {*measured["class_accuracy_of"]} == {"star", "bar"}


def test_a_set_too_small_for_distances_is_told_before_the_training(base, run_script, quick_classifier):
    make_data("five", train=5, val=5)
    measured = ("--data=five", "--depth=1", "--num_iterations=1", "--fid_every=0", "--fid_metric=fd_classifier")
    refused("need 10 images or more, 'five', train, has 5", run_script, "base_train", *PLAIN, *measured)


def test_class_numbers_of_a_file_are_the_names_of_a_set_that_has_such(base, run_script, quick_classifier):
    """Classes 1 to 8 from a file: its 1 is the first, not the second. In a set without such names it is the second."""
    for name, names in (
        ("numbered", [str(k) for k in range(1, 9)]),
        ("tiny", CLASS_NAMES),
    ):
        with DatasetWriter(name, names) as writer:
            for split in ("train", "val"):
                images, labels = draw_shapes(24, seed=len(split))
                writer.append(split, images, y=labels)
        val = open_dataset(name, "val")
        ids = np.arange(len(val))
        shift = int(name == "numbered")
        np.savez(base / f"{name}.npz", val.images(ids).transpose(0, 2, 3, 1), val.labels(ids) + shift)
        judged = evaluate(run_script, "fd_classifier", f"--samples={base}/{name}.npz", f"--data={name}")
        assert judged["class_accuracy"] == judged["real_images"]["class_accuracy"]


@pytest.mark.parametrize(
    "metric, split",
    [
        ("loss", "val"),
        ("fd_classifier", "train"),
    ],
)
def test_damaged_images_are_not_measured(run_dir, run_script, base, metric, split):
    shard = base / "data" / "tiny" / f"{split}_images_000.npy"
    data = shard.read_bytes()
    shard.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    refused(f"{split}_images_000.npy is damaged", run_script, "base_eval", f"--metric={metric}", "--num_images=12")
    assert not [*run_dir.glob("eval_*")]


def test_a_row_for_each_sampler_and_number_of_steps(run_dir, run_script, quick_classifier):
    """The figures that each has by itself; the report shows them."""
    same = ("--num_images=12", "--cfg_scale=1")
    table = evaluate(run_script, "fd_classifier", *same, "--sampler=euler,heun", "--steps=1,3")
    columns = ("sampler", "steps", "network_evaluations")
    assert [[row[column] for column in columns] for row in table["rows"]] == [
        ["euler", 1, 1],
        ["euler", 3, 3],
        ["heun", 1, 1],
        ["heun", 3, 5],
    ]
    assert "<th>heun, 3</th>" in (run_dir / "report.html").read_text()
    one = evaluate(run_script, "fd_classifier", *same, "--sampler=heun", "--steps=3")
    assert table["rows"][3].items() <= one.items()
    assert table["rows"][2]["fd_classifier"] != one["fd_classifier"]


def test_a_judge_brought_along_has_the_figures_of_the_one_trained_here(run_dir, run_script, quick_classifier, tmp_path):
    own = evaluate(run_script, "fd_classifier", *FEW)
    trained = classifier.get_classifier(open_dataset("tiny"), open_dataset("tiny", "val"), "cpu")
    judge = tmp_path / "j"
    weights = trained.state_dict()
    halves = {name: x.half() for name, x in weights.items() if x.is_floating_point()}
    save_safetensors(halves, judge, {"resolution": str(trained.resolution)})
    other = evaluate(run_script, "fd_classifier", *FEW, f"--judge={judge}")
    assert other["fd_classifier"] == pytest.approx(own["fd_classifier"], rel=0.01)
    assert "judge_" in other["network"]
    save_safetensors({"x": torch.zeros(1)}, judge)
    refused("holds no classifier", run_script, "base_eval", *FEW, "--metric=fd_classifier", f"--judge={judge}")


def test_figures_of_what_is_not_finite_are_refused(run_dir, run_script, quick_classifier, monkeypatch):
    build = load.build

    def spoiled(*args, **kwargs):
        loaded = build(*args, **kwargs)
        next(loaded.model.parameters()).data.fill_(float("nan"))
        return loaded

    monkeypatch.setattr(load, "build", spoiled)
    few = (*TIMELESS, "--num_images=12")
    refused("metric=loss: .*not finite", run_script, "base_eval", "--metric=loss", *few)
    with pytest.raises(FloatingPointError, match="^12 of 12 samples are not finite"):
        run_script("base_eval", "--metric=fd_classifier", *few)
    assert not list(run_dir.glob("eval_*"))


def test_models_without_classes_or_colours(base, run_script, quick_classifier):
    with DatasetWriter("tiny", CLASS_NAMES) as writer:
        for split in ("train", "val"):
            images, labels = draw_shapes(24, seed=len(split))
            writer.append(split, images[:, :1], y=labels)
    for tag, class_cond in (
        ("a", False),
        ("b", True),
    ):
        make_run(run_script, tag, f"--class_cond={class_cond}")
        result = evaluate(run_script, "fd_classifier", *FEW, f"--model={tag}")
        assert result["fd_classifier"] > 0
        assert ("class_accuracy" in result) == class_cond
    write_npz(base / "s.npz", open_dataset("tiny", "val"))  # also as gray files
    (base / "s").mkdir()
    for i, image in enumerate(open_dataset("tiny", "val").images(range(24))):
        Image.fromarray(image[0]).save(base / "s" / f"{i:02d}.png")
    of_folder = evaluate(run_script, "fd_classifier", f"--samples={base / 's'}", "--data=tiny")
    of_file = evaluate(run_script, "fd_classifier", f"--samples={base / 's.npz'}", "--data=tiny")
    assert of_folder["fd_classifier"] == pytest.approx(of_file["fd_classifier"], rel=1e-6)
    order = open_dataset("tiny", "val").labels(slice(None)).argsort()  # as files of folders are
    np.savez(base / "sorted.npz", *(x[order] for x in np.load(base / "s.npz").values()))
    some = evaluate(run_script, "class_accuracy", f"--samples={base / 'sorted.npz'}", "--data=tiny", "--num_images=12")
    assert some["num_images"] == 12
    assert len(some["class_accuracy_of"]) > 4
    learned = evaluate(run_script, "fd_simclr", *FEW, "--model=b")  # from colour, without classes
    assert learned["fd_simclr"] > learned["real_images"]["fd_simclr"]
    assert "class_accuracy" not in learned
    judged = (*TIMELESS, "--metric=class_accuracy", f"--judge={features.SIMCLR}", *FEW)
    refused("trained without labels; accepted: a judge of 8 classes", run_script, "base_eval", *judged)


def test_fid(base, run_script, monkeypatch, tmp_path):
    """What holds of any network, with a small one."""
    torch.manual_seed(0)
    network = classifier.Classifier(3, 16, 8, width=4).requires_grad_(False).eval()
    monkeypatch.setattr(features, "load_inception", lambda path, device: network)
    make_data(train=12)
    make_run(run_script, "a", "--class_cond=False")
    result = evaluate(run_script, "fid", "--num_images=10", "--steps=2")
    write_npz(tmp_path / "s.npz", open_dataset("tiny"))
    kept = base / "data" / "tiny" / "stats_classifier_train.npz"  # ADM's and EDM's names of arrays, and some features
    itself = evaluate(run_script, "fid", f"--samples={tmp_path}/s.npz", f"--reference={kept}")
    assert itself["fid"] < 1e-6
    assert itself["num_images"] == 12
    assert itself["recall"] == 1
    assert result["fid"] > itself["fid"]
    assert result["inception_score"] >= 1
    assert 0 <= result["precision"] <= 1
    assert "recall" in result
    assert "class_accuracy" not in result


def test_training_does_not_measure_samples_that_are_not_finite(base, run_script, monkeypatch, quick_classifier):
    """Pictures of NaN have a distance as well."""
    make_data()
    logarithms = lambda self, noise, cond, **more: noise.log()  # NaN where below 0
    monkeypatch.setattr(ModelSamples, "sample", logarithms)
    fid = ("--fid_every=1", "--fid_images=12", "--fid_metric=fd_classifier", "--sample_steps=1")
    with pytest.raises(FloatingPointError, match="^12 of 12 samples are not finite"):
        run_script("base_train", *TINY, "--num_iterations=2", *fid)


def test_training_finds_what_base_eval_finds(base, run_script, quick_classifier):
    make_data()
    same = ("--num_images=12", "--steps=3", "--cfg_scale=3", "--batch_size=8")
    fid = ("--fid_every=1", "--fid_images=12", "--fid_metric=fd_classifier", "--sample_steps=3", "--cfg_scale=3")
    run = (*TINY, "--num_iterations=2", "--model_tag=a", "--save_every=1")
    run_dir = run_script("base_train", *run, *fid)["run_dir"]
    found = {line["step"]: line for line in logged(run_dir) if "val/fd_classifier" in line}
    assert found.keys() == {1, 2}
    for step, line in found.items():
        result = evaluate(run_script, "fd_classifier", *same, f"--checkpoint_step={step}")
        for name in ("fd_classifier", "precision", "recall"):
            assert result[name] == pytest.approx(line[f"val/{name}"], rel=1e-4, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "metric, batch_size, args",
    [
        ("loss", 5, []),
        ("fd_classifier", 4, ["--num_images=13", "--steps=2"]),
        ("fd_classifier", 16, ["--num_images=13", "--steps=2"]),  # one rank draws nothing
        ("bpd", 24, ["--num_images=3"]),  # both ranks have some of a batch
        ("bpd", 24, ["--num_images=1"]),  # the second has none
    ],
)
def test_two_ranks_find_the_figures_of_one(run_dir, run_script, quick_classifier, metric, batch_size, args):
    run_dir = run_dir.with_name("eps" if metric == "bpd" else "flow")
    args = [f"--model={run_dir.name}", *args]
    other = batch_size if metric == "fd_classifier" else 7  # which it records
    one = evaluate(run_script, metric, f"--batch_size={other}", *args)
    (open_dataset("tiny").path / "stats_classifier_train.npz").unlink(missing_ok=True)
    args += [f"--metric={metric}", f"--batch_size={batch_size}"]
    on_ranks(lambda rank: run_script("base_eval", *TIMELESS, *args) and None)
    newest = max(run_dir.glob(f"eval_{metric}_000001_*.json"), key=lambda path: path.stat().st_mtime_ns)
    two = json.loads(newest.read_text())
    for found, other in (
        (one, two),
        (one.pop("real_images", {}), two.pop("real_images", {})),
    ):
        assert found.keys() == other.keys()
        for name, figure in found.items():
            if isinstance(figure, float | list):
                figure = pytest.approx(figure, rel=1e-4)
            assert other[name] == figure
