"""Our recipe for ImageNet at 256 px on eight GPUs: a modern DiT of depth 16 (0.3 B parameters) on cached latents.

Prepare the data as for runs/dit_imagenet256.py, but without --latent_norm=scale. Then:

    torchrun --standalone --nproc_per_node=8 -m scripts.base_train runs/imagenet256.py
    torchrun --standalone --nproc_per_node=8 -m scripts.base_eval --model=imagenet256 --metric=fid --num_images=50000

Not yet run as a whole. Unlike the published recipe: flow matching with logit-normal t, latents normalised per channel,
Muon, a warmdown, and a batch four times as large.
"""

model_tag = "imagenet256"
data = "imagenet256_latents"
flip = True
depth = 16
patch_size = 2
total_batch_size = 1024
device_batch_size = 128
lr = 3e-3
muon_lr = 0.02
num_iterations = 100_000
ema_rates = "0.9999,0.999"
eval_every = 5_000
eval_images = 5_120
sample_every = 5_000
save_every = 5_000
log_every = 50
