"""Turn images into a data set that the training script reads: shards of uint8 in $NANODIFF_BASE_DIR/data/<name>.

python -m scripts.prepare_data --source=cifar10                                    downloads 170 MB
python -m scripts.prepare_data --path=photos/ --resolution=64 --name=photos        a folder, a sub-folder per class
python -m scripts.prepare_data --path=mnist/ --resolution=32 --name=mnist          IDX files
python -m scripts.prepare_data --source=shapes --classes=dots,bar --name=two       some classes alone
python -m scripts.prepare_data --verify=photos                                     compares all files with their SHA-256
"""

import os
import shutil
import time

import numpy as np

from configurator import configure
from nanodiff.common import Progress, UserError
from nanodiff.data.dataset import open_dataset
from nanodiff.data.dataset import verify as verify_dataset
from nanodiff.data.dataset_writer import SPLITS, DatasetWriter, data_dir
from nanodiff.data.sources import open_source

# ---------------------------------------------------------------------------------------------------------------------
# Settings
source = "auto"  # auto|shapes|cifar10|mnist|idx|npz|folder|tar|zip: auto looks at the path
path = ""  # the file or folder to read; "" for shapes, and for cifar10 downloads it
name = ""  # of the set; "" takes the source's, or that of the file or folder
resolution = 0  # 0 or [4, 4096]: pixels a side; other sizes are scaled and cropped; 0 keeps images of one size
labels = "auto"  # auto|folder|file|none: the class is a sub-folder, or the file name up to "_"; none ignores classes
classes = ""  # names of those to take, comma-separated; "" = all; the images of others are left out
val_fraction = 0.05  # [0, 0.9]: held out for validation where the source has no split of its own; 0 disables
seed = 0  # >= 0: of that choice, and of the drawing of shapes
workers = 0  # >= 0: processes that decode image files; 0 = one per core
sha256 = "auto"  # of the file at path; auto = as published for cifar10, unchecked for others; "" disables
overwrite = False  # replace a set of the same name
verify = ""  # name or folder of a set: check it against its checksums, and do nothing else


# ---------------------------------------------------------------------------------------------------------------------
def main():
    if verify:
        dataset = open_dataset(verify, "train")
        count, size = verify_dataset(dataset)
        print(f"data set {verify!r} is whole: {count} files, {size / 1e6:,.1f} MB, each as its SHA-256 says")
        return
    if source == "auto" and not path:
        raise UserError("give --path=... of the images, or --source=shapes or --source=cifar10")
    if classes and not name:
        raise UserError(f"classes={classes!r}: give this part of a set a --name of its own")
    start = time.perf_counter()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    options = source, path, resolution, labels, val_fraction, seed, workers or cores, sha256

    with DatasetWriter(name or default_name(), source=source, seed=seed, overwrite=overwrite) as writer:
        images_in = open_source(*options)
        if classes:
            choose_classes(images_in)
        writer.class_names = images_in.class_names
        check_room(images_in.num_images)
        with Progress(images_in.num_images, "images", "preparing") as bar:
            for images, ids, is_val in images_in.blocks:
                writer.append("train", images[~is_val], ids[~is_val])
                writer.append("val", images[is_val], ids[is_val])
                bar.update(len(images))
        for line in images_in.skipped[:3]:
            print(f"skipped {line}")
        if images_in.skipped or images_in.left_out:
            print(f"skipped {len(images_in.skipped):,} unreadable files and {images_in.left_out:,} of no split")
        if "train" not in writer.meta["splits"]:
            raise UserError(f"path={path!r} holds no image that can be read for training")

    dt = time.perf_counter() - start
    parts = writer.meta["splits"]
    counts = {split: parts[split]["num_images"] for split in SPLITS if split in parts}
    channels, size = writer.meta["channels"], writer.meta["resolution"]
    labelled = f"{len(writer.class_names)} classes" if writer.class_names else "unlabelled"
    print(
        f"made {writer.path} in {dt:.1f} s ({sum(counts.values()) / dt:,.0f} images/s): "
        f"{' + '.join(f'{n:,} {split}' for split, n in counts.items())} images, {channels}x{size}x{size}, {labelled}; "
        f"train on it: python -m scripts.base_train --data={writer.path.name}"
    )


def default_name() -> str:
    """The source's name, or that of the file or folder without its suffixes."""
    if not path:
        return f"shapes{resolution}" if source == "shapes" and resolution not in (0, 16) else source
    stem = os.path.basename(os.path.abspath(path))
    return source if source in ("cifar10", "mnist") else stem.split(".")[0] or stem


def choose_classes(images_in) -> None:
    """Keep the images of `classes` alone, whose numbers become 0, 1, ... in the source's order."""
    names, wanted = images_in.class_names, classes.split(",")
    for unknown in [name for name in wanted if name not in names]:
        raise UserError(f"classes={classes!r}: no class {unknown!r}; the source has: {', '.join(names) or 'none'}")
    kept = np.array([i for i, name in enumerate(names) if name in wanted])
    images_in.class_names = [names[i] for i in kept]

    def chosen(blocks):
        for images, ids, is_val in blocks:
            rows = np.isin(ids, kept)
            yield images[rows], np.searchsorted(kept, ids[rows]), is_val[rows]

    images_in.blocks = chosen(images_in.blocks)


def check_room(num_images: int) -> None:
    """Refuse at once what cannot fit on the disk; the size of the images is known only if `resolution` is given."""
    need, free = num_images * 3 * resolution**2, shutil.disk_usage(data_dir()).free
    if need > free:
        raise UserError(f"{num_images:,} images need {need / 1e9:,.1f} GB, {data_dir()} has {free / 1e9:,.1f} GB free")


if __name__ == "__main__":  # worker processes may import this file again
    config = configure(globals())
    try:
        main()
    except OSError as error:  # a file that may not be read, a disk that fails: it names the file
        raise UserError(str(error)) from None
