"""Photographs as latents, on two CPU cores: six minutes of a small DiT, which begins to memorise them.

python -m scripts.prepare_data --path=FOLDER --resolution=256 --name=photos --aspect_buckets --side_unit=32
python -m scripts.cache_latents --data=photos --autoencoder=taef2_encoder.pth --flip --name=photos_latents
"""

model_tag = "photos_cpu"
data = "photos_latents"
flip = True
depth = 4
patch_size = 4  # of latents: 64 tokens
total_batch_size = 32
num_iterations = 450
eval_every = 150
eval_images = 10
sample_every = 0
sample_steps = 15
save_every = 450
