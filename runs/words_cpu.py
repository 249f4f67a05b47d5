"""Captions as a condition, on two CPU cores in minutes: what runs/words.sh trains."""

model_tag = "words_cpu"
data = "words"
depth = 4
width = 160
objective = "flow_x0"
timestep_shift = 1.3
timestep_std = 0.7
num_iterations = 600
total_batch_size = 64
lr = 3e-3
time_input = "1000t"
warmdown_ratio = 0.8
eval_every = 300
sample_every = -1
cfg_scale = 2.0
cfg_interval = "0.3,0.85"
sampler = "heun"
sample_steps = 10
save_every = 300
