"""The last steps of runs/weights' flow model: a falling rate, and less guidance in the loss (runs/release.sh)."""

model_tag = "cifar10_final"
init_from = "cifar10_plain"
data = "cifar10"
flip = True
seed = 3
num_iterations = 1500
total_batch_size = 128
lr = 2e-3
muon_lr = 0.013
warmdown_ratio = 0.98
guided_from = 0.0
cfg_scale = 2.0
cfg_interval = "0.3,0.7"
sample_steps = 9
eval_every = 500
sample_every = 500
save_every = 250
log_every = 50
