"""Super-resolution on two CPU cores: CIFAR-10 from 8 to 32 pixels, by a small UNet. Grids show small image, sample,
truth."""

model_tag = "superres_cpu"
data = "cifar10"
low_res_size = 8
flip = True
class_cond = False
arch = "unet"
depth = 1
num_res_blocks = 1
optimizer = "adamw"
lr = 1e-3
total_batch_size = 32
num_iterations = 400
sampler = "heun"
sample_steps = 10
eval_every = 200
sample_every = 200
save_every = 200
