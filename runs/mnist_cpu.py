"""A likelihood in bits/dim on two CPU cores in half an hour: IDDPM's UNet and L_vlb on MNIST's 28 pixels.

OMP_NUM_THREADS=1 torchrun --nproc_per_node=2 -m scripts.base_train runs/mnist_cpu.py
"""

model_tag = "mnist_cpu"
data = "mnist"
arch = "unet"
depth = 1
num_res_blocks = 1
attention_resolutions = "7"
class_cond = False
objective = "eps"
num_timesteps = 4000
variance = "learned_range"
gaussian_loss = "rescaled_kl"
timesteps = "loss-second-moment"
num_iterations = 3600
total_batch_size = 64
lr = 0.004
muon_lr = 0.02
eval_every = -1
sample_every = 0
cfg_scale = 1.0
