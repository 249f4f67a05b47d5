"""The fields of a request for samples. Their comments are rules that configurator.py reads: the page's form keeps them,
and scripts/sample_web.py refuses other values."""

run = ""  # tag of the run
checkpoint_step = 0  # >= 0: a step of its checkpoints
ema = ""  # which of its weights
classes = ""  # class numbers, a list or comma-separated; "" = all
num_images = 16  # [1, 64]
steps = 25  # [1, 1000]
sampler = "auto"  # which sampler
cfg_scale = 1.0  # [0, 100]
cfg_interval = "0,1"  # where guidance acts
seed = 0  # [0, 9007199254740991]: JavaScript counts no further
from_image = ""  # content of an image file, in base64
strength = 0.6  # [0, 1]: fraction of the steps to run, from the noised from_image
