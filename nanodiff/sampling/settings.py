"""Settings of Loaded.sample: as in scripts/sample.py. Their comments are rules that configurator.py enforces."""

num_images = 16  # >= 1: how many
first = 0  # >= 0: number of the first
classes = ""  # class numbers or names, in turn; "" = all
size = ""  # HEIGHTxWIDTH or SIDE in pixels; "" = square
given = ""  # second images
low_res = ""  # super-resolution: small images
vectors = ""  # a row per image
seed = 0  # >= 0: seed of the images
from_images = ""  # images to start from
strength = 0.6  # [0, 1]: fraction of the steps to run, from their noised form; 1 = from pure noise
mask = ""  # white parts of from_images are kept, gray ones for a part of the steps
autoencoder = ""  # path of a latent model's VAE
sampler = "auto"  # which sampler
steps = 0  # >= 0: steps of the sampler; 0 = the run's
respacing = ""  # which timesteps a Gaussian diffusion keeps
eta = 0.0  # [0, 1]: noise of ddim
cfg_scale = -1.0  # -1 or [0, 100]: guidance; -1 = the run's
cfg_interval = ""  # guide only where t is in this interval; "" = the run's
cfg_channels = 0  # >= 0: guide only the first channels; 0 = all of the image's
batch_size = 64  # >= 1: images at a time
dtype = "auto"  # auto|bfloat16|float16|float32: dtype of the matrix products
