"""Tune the flow model of runs/release.sh to sample in one to four steps."""

model_tag = "cifar10_map"
init_from = "cifar10_final2"
data = "cifar10"
flip = True
seed = 1
objective = "flow_map"
num_iterations = 5000
total_batch_size = 128
lr = 4e-4
muon_lr = 0.004
warmdown_ratio = 0.8
eval_every = -1
sample_every = 1000
save_every = 500
log_every = 50
