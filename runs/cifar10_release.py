"""A flow model of CIFAR-10, from which the models in runs/weights are tuned (runs/release.sh)."""

model_tag = "cifar10_release"
data = "cifar10"
flip = True
seed = 1
depth = 4
patch_size = 4  # 64 tokens
num_iterations = 14338
total_batch_size = 128
lr = 3e-3
muon_lr = 0.02
time_input = "1000t"
warmup_ratio = 0.028  # 400 steps
warmdown_ratio = 0.2441  # the last 3,500 steps
guided_from = 0.7559  # the same steps
cfg_scale = 4.0
cfg_interval = "0.3,0.7"
sample_steps = 9
eval_every = 2000
sample_every = 2000
save_every = 1000
log_every = 50
