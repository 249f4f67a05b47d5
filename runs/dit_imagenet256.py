"""DiT-XL/2 on ImageNet at 256 px as published (Peebles & Xie 2022): 675 M parameters, 400,000 steps of 256 latents.

Stage one, with Stable Diffusion's autoencoder (sd-vae-ft-ema) and ImageNet's 1.28 M training images in class folders:

    python3 -m scripts.prepare_data --path=imagenet/train --resolution=256 --name=imagenet256 --val_fraction=0.01
    torchrun --standalone --nproc_per_node=8 -m scripts.cache_latents --data=imagenet256 --autoencoder=sd-vae-ft-ema/ \
        --name=imagenet256_latents --flip --latent_norm=scale     # 0.18215

Stage two: torchrun --standalone --nproc_per_node=8 -m scripts.base_train runs/dit_imagenet256.py

The paper encodes on the fly. We sample the stored distributions anew at each step, which is the same.
For the 7 M steps of the released model: --num_iterations=7000000.
Sample as published: python3 -m scripts.sample --sampler=ddpm --steps=250 --cfg_scale=1.5 --cfg_channels=3.
"""

model_tag = "dit_imagenet256"
data = "imagenet256_latents"
flip = True
# DiT-XL/2: 28 blocks of width 1152 with 16 heads
arch = "dit_classic"
depth = 28
width = 1152
heads = 16
patch_size = 2
# diffusion/__init__.py: 1000 linear steps, learned sigma, the hybrid loss (MSE + vb with detached mean)
objective = "eps"
noise_schedule = "linear"
num_timesteps = 1000
variance = "learned_range"
gaussian_loss = "mse"
timesteps = "uniform"
label_drop = 0.1
# train.py: AdamW 1e-4 without decay, batch 256, no warmup, no schedule, no clipping, EMA 0.9999
optimizer = "adamw"
lr = 1e-4
weight_decay = 0.0
beta2 = 0.999
total_batch_size = 256
device_batch_size = 32
num_iterations = 400_000
warmup_ratio = 0.0
warmdown_ratio = 0.0
grad_clip = -1.0
ema_rates = "0.9999"
ema_ramp = False
sampler = "ddpm"
sample_steps = 250
cfg_scale = 4.0
cfg_interval = "0,1"
eval_every = 10_000
sample_every = 50_000
save_every = 50_000
log_every = 100
