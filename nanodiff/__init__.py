"""Train image diffusion models, and sample from them.

import nanodiff
images = nanodiff.load("shapes_cpu").sample(classes=["ring", 3], num_images=4)  # (4, 16, 16, 3) uint8
"""


def load(run: str = "", step: int | str = "newest", ema: str = "", device_type: str = ""):
    """Load a model, a formats.load.Loaded, by the tag or folder of its run, or a file, as scripts/sample.py does."""
    from nanodiff.device import init_device  # here, as importing torch takes seconds
    from nanodiff.formats.load import load_run

    return load_run(run, init_device(device_type), step, ema)
