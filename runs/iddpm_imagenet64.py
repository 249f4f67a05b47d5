"""IDDPM's unconditional ImageNet-64, L_hybrid, as published (Nichol & Dhariwal 2021): 1.5 M steps, 121 M parameters.

For the paper's L_vlb, add --gaussian_loss=rescaled_kl --timesteps=loss-second-moment.
Sample with --sampler=ddpm --steps=4000.
"""

model_tag = "iddpm_imagenet64"
data = "imagenet64"
class_cond = False
# --image_size 64 --num_channels 128 --num_res_blocks 3 --learn_sigma True
arch = "unet"
depth = 4
num_res_blocks = 3
variance = "learned_range"
dropout = 0.0
# --diffusion_steps 4000 --noise_schedule cosine, and by default rescaled timesteps and rescaled learned sigmas
objective = "eps"
num_timesteps = 4000
noise_schedule = "cosine"
gaussian_loss = "rescaled_mse"
timesteps = "uniform"
# --lr 1e-4 --batch_size 128; torch's AdamW, EMA 0.9999, no schedule, no clipping
optimizer = "adamw"
lr = 1e-4
beta2 = 0.999
total_batch_size = 128
num_iterations = 1_500_000
warmup_ratio = 0.0
warmdown_ratio = 0.0
grad_clip = -1.0
ema_rates = "0.9999"
ema_ramp = False
sampler = "ddim"
sample_steps = 50
sample_every = 10_000
eval_every = 10_000
save_every = 10_000
