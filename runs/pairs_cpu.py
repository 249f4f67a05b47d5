"""A second image as a condition, on two CPU cores in minutes: what runs/pairs.sh trains."""

model_tag = "pairs_cpu"
data = "pairs"
depth = 4
width = 160
objective = "flow_x0"
timestep_shift = 1.3
num_iterations = 400
total_batch_size = 64
lr = 3e-3
time_input = "1000t"
warmdown_ratio = 0.8
eval_every = 200
sample_every = 400
cfg_scale = 1.5
cfg_interval = "0,1"
sampler = "heun"
sample_steps = 10
save_every = 200
