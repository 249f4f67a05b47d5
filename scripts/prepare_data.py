"""Turn images into a data set for training: shards of uint8, or fp16 for arrays, in $NANODIFF_BASE_DIR/data/<name>.

python3 -m scripts.prepare_data --source=cifar10                                    downloads 170 MB
python3 -m scripts.prepare_data --path=photos/ --resolution=64 --name=photos        a folder, one sub-folder per class
python3 -m scripts.prepare_data --path=shards/ --resolution=64 --name=web           WebDataset's tars; or 'shards/*.tar'
python3 -m scripts.prepare_data --path=photos/ --resolution=64 --aspect_buckets     images keep their shape
python3 -m scripts.prepare_data --path=mnist/ --name=mnist                          IDX files
python3 -m scripts.prepare_data --path=scans.npy --range=-1000,3000                 (N, H, W), any numbers
python3 -m scripts.prepare_data --source=shapes --classes=dots,bar --name=two       some of the classes
python3 -m scripts.prepare_data --verify=photos                                     verifies all files by SHA-256

Folders named train, val or test are splits. Unreadable files are listed in skipped.txt.
After a kill the same command resumes, with any number of workers; of a complete set it says that.
"""

import os
import re
import sys
import time
from collections import Counter

from configurator import configure
from nanodiff.common import Progress, UserError, count, print0
from nanodiff.conditions import NUMBERS
from nanodiff.data import dataset
from nanodiff.diffusion.process import parse_interval
from nanodiff.files import read_json, write_atomic
from nanodiff.prepare.decode import check_size
from nanodiff.prepare.parts import make_parts
from nanodiff.prepare.sources import (
    SOURCES,  # noqa: F401 (a setting names it)
    Options,
    add_numbers,
    add_pairs,
    open_source,
    state_of,
)

# ---------------------------------------------------------------------------------------------------------------------
# Settings
source = "auto"  # auto|{SOURCES}: auto looks at the path
path = ""  # file or folder to read, or a pattern of tars; "" for shapes, and for cifar10 to download it
name = ""  # data set name; "" = the source's, file's or folder's
resolution = 0  # 0 or [4, 4096]: pixels per side; other images are scaled and cropped; 0 = as they are, all of one size
labels = "auto"  # folder = by sub-folder (folder:1, folder:2: of this level); file = by file name up to "_" or ".";
#                  none = no classes; or a table: .csv, .tsv, .jsonl, .json. auto = by metadata.csv or the like, else
#                  the .cls or .json beside an image, else folder
file_column = ""  # column of tables; "" = file_name, file, filename, image, path, image_id or id; suffixes may lack
label_column = ""  # column of tables and of .json beside images; "" = label or class
caption_column = ""  # "" = text, caption or prompt; captions are also in the .txt beside images
captions = ""  # .tsv file to write: the path of every image, a tab, its caption
classes = ""  # names or numbers of the classes to take, comma-separated, "in quotes" if they have commas; "" = all
vectors = ""  # vectors to condition a model on: an .npz of image names, matched as in tables, and vectors, one (D) or a
#               sequence (L, D) per name; for arrays of images also an .npy, in their order
pairs = ""  # second images to condition a model on, such as masks: a folder with a file of the same path as each image,
#             with any suffix; for arrays an .npy or .npz, in their order. Values 0..255 become -1..1
pairs_scaling = "nearest"  # nearest|area: how second images are scaled; area for pictures, nearest for masks
scaling = "bicubic"  # bicubic|nearest|area: how image files are scaled; nearest adds no colours, for sprites
background = "white"  # white|black|gray: behind transparent parts of images
aspect_buckets = False  # keep images' shapes: a few sizes of about resolution^2 pixels each, from 9:16 to 16:9
val_fraction = 0.05  # [0, 0.9]: held out for validation if the source has no split of its own
seed = 0  # >= 0: seed for choosing held-out images and for drawing shapes
workers = 0  # >= 0: threads that decode image files; 0 = one per core
overwrite = False  # replace a set of the same name
verify = ""  # name or folder of a set: only check it against its checksums
# Arrays of uint16, floats, ... in .npz or .npy, or gray images of 16 or 32 bits in PNG or TIFF
range = ""  # LOW,HIGH: the values that become -1 and 1; "" = an array's least and largest, an image's upper 8 bits
# Only aspect_buckets=True
side_unit = 0  # >= 0: sides are multiples of this; 0 = resolution / 8: suits a DiT's patches
config = configure(globals())

# ---------------------------------------------------------------------------------------------------------------------
# Check a set, or the settings

if verify:
    count, size = dataset.verify(dataset.open_dataset(verify))
    print0(f"data set {verify!r} is intact: {count} files, {size / 1e6:,.1f} MB, each matches its SHA-256")
    sys.exit()
if classes and not name:
    raise UserError(f"classes={classes!r}: give this part of a set a --name of its own")
unit = side_unit or 16
if aspect_buckets and (resolution == 0 or resolution % unit):
    raise UserError(f"resolution={resolution}; accepted with aspect_buckets: multiples of {unit}")
options = Options(**config)
if range:
    options.range = parse_interval(range, "range", -1e300, 1e300)
cores = os.cpu_count()
if hasattr(os, "sched_getaffinity"):  # Linux: fewer in a container
    cores = len(os.sched_getaffinity(0))
if not name:
    name = source
    if path and source != "cifar10":
        stem = os.path.basename(os.path.abspath(path))
        name = stem.split(".")[0] or stem
    name = re.sub(r"[^\w.+-]", "_", name, flags=re.ASCII)
if name in dataset.SHAPES:
    raise UserError(f"name={name!r} is an embedded set, drawn on first use; choose another --name")

# ---------------------------------------------------------------------------------------------------------------------
# Read, decode and write the images, part by part

start = time.perf_counter()
writer = dataset.DatasetWriter(name, overwrite=overwrite)
images_in = open_source(source, path, options)
images_in.look = (images_in.meta.get("range"), scaling, background)
if pairs:
    add_pairs(images_in, pairs, pairs_scaling)
for condition in NUMBERS:
    if config[condition]:
        add_numbers(images_in, condition, config[condition])
class_names = images_in.class_names
if classes:  # keep only images of these, numbered 0, 1, ... in the source's order
    from nanodiff.sampling.loaded import parse_classes  # lazy

    numbers = sorted({*parse_classes(classes, class_names)})
    class_names = [class_names[number] for number in numbers]
    images_in.items = (
        item._replace(label=numbers.index(item.label)) for item in images_in.items if item.label in numbers
    )
plan = config | {
    "parts": 4,  # another number whenever make_tasks cuts differently
    "workers": 0,  # the parts do not depend on their number
    "overwrite": False,
    "path": os.path.abspath(path),
    "files": state_of(images_in.files),
}
plan_file = writer.path / "plan.json"
if not overwrite and plan_file.exists() and read_json(plan_file) == plan:
    print0(f"data set {name!r} is complete: made by this command from these files; --overwrite makes it anew")
    sys.exit()
with writer:
    writer.meta |= {"source": source, "seed": seed, "class_names": class_names, "resolution": resolution}
    writer.meta |= images_in.meta
    if "range" in images_in.meta:
        print0("values {:g} to {:g} become -1 to 1, in fp16".format(*images_in.meta["range"]))
    writer.resume(plan)
    faults = images_in.unreadable
    losses = Counter()
    first = None
    with Progress(images_in.num_images, "images", "preparing") as bar:
        for note in make_parts(images_in, resolution, writer.folder, workers or cores):
            for group in note["groups"]:
                first = first or group
                if not images_in.sizes:
                    check_size(group["name"], group["shape"][1:], first["shape"][1:])
                cond = {condition: images_in.arrays[condition][rows] for condition, rows in group["rows"].items()}
                writer.add(group["split"], group["shard"], y=group["y"], **cond)
            faults += note["skipped"]
            losses.update(note["losses"])
            bar.update(note["items"])
    if faults:
        print0(f"skipped {len(faults):,} unreadable files (see skipped.txt): {faults[0]}, ...")
        write_atomic(writer.folder / "skipped.txt", "\n".join([*faults, ""]).encode(errors="replace"))
    for loss, number in losses.items():
        print0(f"{loss}: {count(number, 'image', 'images')}")

# ---------------------------------------------------------------------------------------------------------------------
# What was made

dt = time.perf_counter() - start
result = dataset.open_dataset(writer.path)
numbers = " + ".join(f"{part['num_images']:,} {split}" for split, part in result.meta["splits"].items())
sizes = " or ".join(f"{result.channels}x{height}x{width}" for height, width in result.buckets)
details = count(result.num_classes, "class", "classes") if class_names else "unlabelled"
if pairs:
    details += ", second images of {given_channels} channels ({given_scaling})".format(**result.meta)
details = ", ".join([details, *images_in.arrays])
print0(
    f"made {writer.path} in {dt:.1f} s: {numbers} images, {sizes}, {details}; "
    f"train on it: python3 -m scripts.base_train --data={writer.path.name}"
)
