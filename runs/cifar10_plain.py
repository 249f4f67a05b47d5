"""Train the flow model of runs/cifar10_release.py further, without guidance, at a constant rate (runs/release.sh)."""

model_tag = "cifar10_plain"
init_from = "cifar10_release"
data = "cifar10"
flip = True
seed = 2
num_iterations = 2963
total_batch_size = 128
lr = 3e-3
muon_lr = 0.02
warmup_ratio = 0.07  # 200 steps
warmdown_ratio = 0.0
guided_from = 1.0
cfg_scale = 1.0
eval_every = 2000
sample_every = 2000
save_every = 500
log_every = 50
