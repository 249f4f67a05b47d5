"""What scripts/sample.py and Loaded.sample both accept. The comments are rules that configurator.py enforces."""

from nanodiff.diffusion.process import SAMPLERS  # noqa: F401 (a rule below names it)

# Images
num_images = 64  # >= 1: how many (by default 16 in Python); a grid shows the first 256
first = 0  # >= 0: number of the first; --first=37 --num_images=1 draws image 37 alone
classes = ""  # class names or numbers, comma-separated, used in turn (for a name with a comma, a number); "" = all or,
#               with npz, in the training set's proportions; with second images or vectors, their labels
size = ""  # HEIGHTxWIDTH or SIDE in pixels; "" = square or, for a model trained on aspect buckets, its sizes in turn
pairs = ""  # second images: a folder, an .npz (arr_0, arr_1), .npy or val; "" = val, if there is one
low_res = ""  # super-resolution: small images, an .npz (arr_0, arr_1), .npy, folder or val; "" = val, if there is one
vectors = ""  # .npy or .npz (N, D) or (N, L, D): image i takes row i; "" = the validation images' vectors
seed = 0  # >= 0: seed of the images
# Images to start from
from_images = ""  # images to start from, in turn: a file, folder, .npz (arr_0) or .npy; "" = from noise
strength = 0.6  # [0, 1]: fraction of the steps to run from the noised image; 1 = from pure noise, 0 = return the image
mask = ""  # an image file, or an .npy (H, W): from_images are kept where it is white; gray keeps a part of the steps
# Sampler
# Steps, sampler and guidance are by default those of the run's own grids
sampler = "auto"  # auto|{SAMPLERS}: for a published file, auto = ralston for flow matching, ddim for Gaussian diffusion
steps = 0  # >= 0: steps of the sampler; 0 = the run's; for a published file 50, of ralston 33
respacing = ""  # "250", "10,15,20" or "ddim50": which timesteps a Gaussian diffusion keeps; "" = steps evenly spaced
eta = 0.0  # [0, 1]: noise of ddim; 1 = as much as ddpm
# Guidance
cfg_scale = -1.0  # -1 or [0, 100]: guidance away from the null class; 1 = none; -1 = the run's or 1.5
cfg_interval = ""  # guide only where t, from 0 (image) to 1 (noise), is in this interval, "0,1"; "" = the run's
cfg_channels = 0  # >= 0: guide only the first channels (3 in the published DiT); 0 = all of the image's
# Computation
autoencoder = ""  # path of a latent model's VAE; "" = where it was when the latents were made
batch_size = 64  # >= 1: images at a time on each rank
dtype = "auto"  # auto|bfloat16|float16|float32: dtype of the matrix products
