"""
Evaluate a trained model, or images in a file or a folder.

    python3 -m scripts.base_eval --metric=loss               # validation loss of the averaged weights, by t
    python3 -m scripts.base_eval --metric=bpd                # bits/dim of a Gaussian diffusion; by timestep in the file
    python3 -m scripts.base_eval --metric=class_accuracy     # do samples show the class they were asked for?
    python3 -m scripts.base_eval --metric=well_formed        # are samples drawn as well as real shapes? embedded sets
    python3 -m scripts.base_eval --metric=fid --num_images=50000 --cfg_scale=1    # FID, IS, precision, recall
    python3 -m scripts.base_eval --metric=fd_classifier      # the same with the data set's classifier: no download
    python3 -m scripts.base_eval --metric=fd_classifier --sampler=euler,heun --steps=5,10,25    # one row for each pair
    python3 -m scripts.base_eval --metric=fid --samples=images.npz --data=cifar10    # or a folder of PNG or JPEG files
    torchrun --standalone --nproc_per_node=8 -m scripts.base_eval --model=... --metric=...
"""

import contextlib
import math
from dataclasses import replace
from itertools import pairwise

import numpy as np

from configurator import configure
from nanodiff.common import UserError, at, base_dir, is_first_rank, print0
from nanodiff.data.codec import load_codec
from nanodiff.data.dataset import SHAPES, match_labels, open_dataset, verify
from nanodiff.device import autocast_to, choose_dtype, init_device
from nanodiff.diffusion.process import SAMPLERS  # noqa: F401 (the settings name SAMPLERS)
from nanodiff.dist import gather_batches, leave_together
from nanodiff.files import name_of_settings, write_json
from nanodiff.formats.load import load_run
from nanodiff.metrics import features as metrics
from nanodiff.metrics.network import share_by_class
from nanodiff.metrics.sample_files import Samples
from nanodiff.metrics.well_formed import measure_form
from nanodiff.sampling.draw import in_words
from nanodiff.sampling.loaded import open_samples, settings_for
from nanodiff.training.validation import bits_per_dim, validation_loss
from nanodiff.web.report import refresh_report

metric = "loss"  # loss|bpd|class_accuracy|well_formed|fid|fd_classifier|fd_simclr: what to measure
data = ""  # prepared set to evaluate on, or to compare with; "" = the training set
num_images = 0  # >= 0: validation images, or samples; 0 = all in `samples`, else 5,000 for a distance (published FIDs
#                 use 50,000) and 400 for the rest
batch_size = 64  # >= 1: images at a time on each rank
device_type = ""  # ""|cuda|cpu|mps: "" = the best present
dtype = "auto"  # auto|bfloat16|float16|float32: dtype of the matrix products
# Only samples=""
model = ""  # tag or folder of a run, or a file; "" = the run written to last
checkpoint_step = "newest"  # newest or >= 0: step of the run's checkpoint
ema = ""  # which average of the weights: a rate, or raw; "" = the first rate
autoencoder = ""  # path of the VAE of a latent model; "" = where it was when the latents were made
seed = 0  # >= 0: seed of the samples, of t in the validation loss, or of noise in bits/dim
# Only metric=class_accuracy|well_formed|fid|fd_classifier|fd_simclr
samples = ""  # images to measure instead of the run's: an .npz as scripts/sample.py writes it, or a folder
# Only metric=class_accuracy|well_formed|fid|fd_classifier|fd_simclr and Only samples=""
# Steps, sampler and guidance are by default those of the run's own grids
sampler = "auto"  # {SAMPLERS}, or several, comma-separated; auto = the run's
steps = "0"  # steps of the sampler, or several numbers, comma-separated; 0 = the run's, for a published file 50 or 33
cfg_scale = -1.0  # -1 or [0, 100]: classifier-free guidance; 1 = none; -1 = the run's, 1.5 for a published file
cfg_interval = ""  # guide only where t, from 0 (image) to 1 (noise), is in this interval, "0,1"; "" = the run's
low_res = ""  # super-resolution: small images, an .npz (arr_0, arr_1), a folder or val; "" = val, if there is one
# Only metric=fid|fd_classifier|fd_simclr
reference_split = "train"  # train|val: split to compare with, in full
reference = ""  # .npz with mu and sigma of the judge's features to compare with instead, such as Inception's,
#                 published with ADM and EDM; runs/records has one of CIFAR-10
# Only metric=class_accuracy|fid|fd_classifier|fd_simclr
judge = ""  # weights of Inception (fid) or of a classifier, such as those in runs/records, so that figures of two
#             machines compare; "" = download Inception or train a classifier on the set, once
config = configure(globals())
FIGURES = dict(  # what is printed, in this order; the file has all figures
    line.strip().split(" = ")
    for line in """
    loss = validation loss {:.4f}
    loss_q0 = t < 1/4 (image) {:.4f}
    loss_q1 = t < 1/2 {:.4f}
    loss_q2 = t < 3/4 {:.4f}
    loss_q3 = t < 1 (noise) {:.4f}
    total_bpd = {:.4f} bits/dim
    well_formed = {:.1%} well formed
    fid = FID {:.3f}, lower is better
    fd_classifier = distance (fd_classifier) {:.3f}, lower is better
    fd_simclr = distance (fd_simclr) {:.3f}, lower is better
    inception_score = IS {:.3f}
    precision = precision {:.3f}
    recall = recall {:.3f}
    copies = {:.1%} copies
    class_accuracy = {:.1%} show their class
    """.strip().splitlines()
)

# ---------------------------------------------------------------------------------------------------------------------
# The run or the samples to evaluate, and the name of their data set

device = init_device(device_type, 86_400, config)  # the first rank may compare for long
compute_dtype = choose_dtype(dtype, device)
autocast = autocast_to(device, compute_dtype)
result = {"metric": metric}
run = None
if samples:
    source = samples  # in messages
    image_set = Samples(samples)
    name = data or image_set.data
else:
    run = load_run(model, device, checkpoint_step, ema)
    source = run.source
    name = data or run.data.name
    with contextlib.suppress(UserError):  # there may be no such set
        if not data and open_dataset(name).sha256 != run.data.sha256:
            print0(f"note: {name!r} was made anew after {source} was trained: it may have seen held-out images")
    result |= run.described()
    result["dtype"] = str(compute_dtype).removeprefix("torch.")
if not (name or reference):
    raise UserError(f"{source} does not say which data set it belongs to: give data=...")

# ---------------------------------------------------------------------------------------------------------------------
# Losses on held-out images

if metric in ("loss", "bpd"):
    dataset = open_dataset(name, "val")
    if run.num_classes:
        if not dataset.num_classes:
            raise UserError(f"data={name!r} has no labels, {source} has {run.num_classes} classes")
        dataset = dataset.relabelled(match_labels(dataset.class_names, run.data.class_names, f"data={name!r}"))
    verify(dataset, ["val"])
    codec = load_codec(run.data, device, autoencoder)
    codec.accept(dataset)
    inputs = run.model, run.process, dataset, codec
    num_images = min(num_images or 400, len(dataset))
    result["data"] = dataset.name

if metric == "loss":
    with autocast:
        loss, quarters = validation_loss(*inputs, num_images, batch_size, seed)
        if not run.process.is_gaussian:  # t is not uniform: the quarters have few images near t = 0 and 1
            few = math.ceil(num_images / 20)
            edges = [0, *np.linspace(0.02, 0.98, 19).tolist(), 1]
            by_t = [validation_loss(*inputs, few, batch_size, seed, part)[0] for part in pairwise(edges)]
            result["loss_by_t"] = by_t
            print0("loss by t: [0, 0.02], 18 parts of 0.053, [0.98, 1]: " + " ".join(f"{x:.3f}" for x in by_t))
    result["loss"] = loss
    for i, loss in enumerate(quarters):
        if not math.isnan(loss):  # no image
            result[f"loss_q{i}"] = loss

elif metric == "bpd":
    kind = run.data.kind
    if not run.process.is_gaussian or kind != "images":
        raise UserError(f"metric=bpd: {source} is {run.process.kind} of {kind}; accepted: Gaussian diffusion of images")
    with autocast:
        result |= bits_per_dim(*inputs, num_images, batch_size, seed)
    result["timesteps"] = run.process.num_timesteps

# ---------------------------------------------------------------------------------------------------------------------
# Samples: from a file or folder, or drawn by the model, one batch at a time

else:
    is_distance = metric in metrics.DISTANCES  # to real images
    if samples:
        ids = np.random.default_rng(0).permutation(image_set.num_images)  # a file may have its images by class
        ids = np.sort(ids[: num_images or None])
        num_images = len(ids)
        names = image_set.class_names
        plan = [image_set]
    else:
        num_images = num_images or (5000 if is_distance else 400)
        ids = np.arange(num_images)
        counts = steps.split(",")
        if not all(map(str.isdecimal, counts)):
            raise UserError(f"steps={steps!r}; accepted: a whole number, or several, comma-separated")
        model_samples = open_samples(run, seed=seed, low_res=low_res, autoencoder=autoencoder)
        model_samples.in_proportion(name, reference_split, num_images)
        plan = []
        for sampler_name in sampler.split(","):
            for count in counts:
                settings = settings_for(run, **config | {"sampler": sampler_name, "steps": int(count)})
                plan.append(replace(model_samples, settings=settings))
        image_set = plan[0]
        config |= settings.named if len(plan) == 1 else settings.guidance
        config.defaults |= settings_for(run).named  # the file's name says what differs from the run's own
        names = run.class_names
        result["batch_size"] = batch_size
    result |= image_set.protocol
    if is_distance and num_images < 10:
        raise UserError(f"metric={metric} needs 10 images or more, got {num_images}")
    if not is_distance and not image_set.num_classes:
        raise UserError(f"metric={metric}: {source} has no classes, or 0 alone")
    has_classes = metric not in ("fid", "fd_simclr") and image_set.num_classes and not reference
    labels = image_set.labels(ids)  # (N,) the class that each image should show
    if not reference:
        dataset = metrics.image_set(name, reference_split)
        result["data"] = dataset.name
        if metric == "well_formed" and dataset.name not in SHAPES:
            raise UserError(f"metric=well_formed: data={dataset.name!r}; accepted: {', '.join(SHAPES)}")
        shape = dataset.channels, dataset.resolution, dataset.resolution
        is_known_size = image_set.shape[1:] in {shape[1:], *dataset.buckets}
        if not is_known_size or image_set.shape[0] < dataset.channels:  # a gray PNG is read as 3 channels
            raise UserError(f"data={name!r} has (channels, height, width) {shape}, {source} {image_set.shape}")
        if has_classes:  # number the classes as the data set does
            label_names = [names[k] if names else str(k) for k in labels]  # prepare_data takes numbers as names
            if {*label_names} <= {*dataset.class_names}:
                labels = np.array([*map(dataset.class_names.index, label_names)])
            elif names:
                labels = np.array(match_labels(names, dataset.class_names, f"{source} for data={name!r}"))[labels]
            elif labels.max() >= dataset.num_classes:
                raise UserError(
                    f"{source} has class {labels.max()}, data={name!r} {dataset.num_classes} classes, from 0"
                )

    if metric != "well_formed":
        network = metrics.load_network(metric, name, device, judge)
        result["network"] = network.title
        if reference:
            reference_stats = metrics.load_stats(reference, network.num_features)
            result["reference"] = reference
        elif is_distance:
            reference_stats = metrics.reference_features(dataset, network)
            result["reference"] = f"{dataset.name}, {reference_split}, {len(dataset):,} images"
        if has_classes and network.num_classes != dataset.num_classes:
            has_classes = False
            if not is_distance:
                raise UserError(f"metric={metric}: {network.title}; accepted: a judge of {dataset.num_classes} classes")
        if is_distance and num_images < network.num_features:
            print0(f"note: {num_images:,} images for {network.num_features:,} features: the distance is biased upwards")

    def measure(image_set, ids, labels) -> dict:
        """Figures of these images, which should show these classes; on the first rank, {} on the others."""
        batches = image_set.batches(ids, batch_size)
        if metric == "well_formed":
            images = gather_batches(image_set.images, batches, "samples")
            return measure_form(np.concatenate(images), labels) if images else {}
        stats = metrics.collect_features(image_set.images, batches, network, "samples")
        if not stats:
            return {}
        row = metrics.compare(metric, stats, reference_stats) if is_distance else {}
        if has_classes:
            is_right = stats.logits.argmax(1).numpy() == labels
            row |= share_by_class(is_right, labels, dataset.class_names, "class_accuracy")
        return row

    rows = []  # figures, one row for each sampler and number of steps
    columns = "sampler steps network_evaluations".split() if len(plan) > 1 else ()
    for image_set in plan:
        row = {key: image_set.protocol[key] for key in columns}
        with autocast:
            row |= measure(image_set, ids, labels)
        if run:
            image_set.check_finite(num_images)
        rows.append(row)
    for key in columns:
        del result[key]
    result |= {"rows": rows} if columns else rows[0]

    # The same figures for as many real images of the other split
    if not reference:
        other_split = "val" if reference_split == "train" else "train"
        n = min(num_images, dataset.meta["splits"].get(other_split, {}).get("num_images", 0))
        if n >= 10:
            real = metrics.image_set(name, other_split)
            verify(real, [other_split])
            real_ids = real.spread(n)
            result["real_images"] = {"split": other_split, "num_images": n}
            result["real_images"] |= measure(real, real_ids, real.labels(real_ids))

# ---------------------------------------------------------------------------------------------------------------------
# Save the figures and their protocol beside the run or the samples


def in_line(row: dict) -> str:
    return ", ".join(text.format(row[key]) for key, text in FIGURES.items() if key in row)


for row in result.get("rows", [result]):
    for key, value in row.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"metric={metric}: {key} of {source} is {value}: its weights or predictions are not finite")
    title = "{sampler:>6} {steps:>4} steps ({network_evaluations} evaluations): " if "rows" in result else ""
    print0(title.format(**row) + in_line(row))
if real := result.get("real_images"):
    print0(f"{real['num_images']:,} real images: {in_line(real)}")
words = [
    run.title if run else source,
    in_words(result),
    f"{num_images:,} images",
    f"against {result['reference']}" if "reference" in result else "",
]
print0(", ".join(filter(None, words)))
if num_images < config["num_images"]:
    print0(f"num_images={config['num_images']:,}: there are only {num_images:,}")
    config["num_images"] = num_images  # for the file's name
result["num_images"] = num_images
path = at(source)
folder = path.parent
stem = path.name  # with its suffix: x.npz may lie beside a folder x
if run:
    folder = run.run_dir or base_dir() / "samples"
    stem = f"{run.step:06d}" if run.run_dir else run.path.stem
if is_first_rank():
    # They change no figure, or are in the stem
    apart = "model metric checkpoint_step samples batch_size device_type".split()
    if run and not run.is_named_by(model):  # then the name says which of several files
        apart = apart[1:]
    path = folder / (name_of_settings(f"eval_{metric}_{stem}", config, *apart) + ".json")
    folder.mkdir(parents=True, exist_ok=True)
    write_json(path, result)
    print0(f"written to {path}")
    if run and run.run_dir:
        refresh_report(run.run_dir)
leave_together()
