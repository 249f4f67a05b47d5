"""Tune the flow model of runs/cifar10_final.py to sample in one to four steps (runs/release.sh)."""

model_tag = "cifar10_map"
init_from = "cifar10_final"
data = "cifar10"
flip = True
seed = 1
objective = "flow_map"
num_iterations = 4800
total_batch_size = 128
lr = 1e-3
muon_lr = 0.01
warmdown_ratio = 0.8
eval_every = -1
sample_every = 1000
save_every = 500
log_every = 50
