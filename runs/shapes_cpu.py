"""The embedded shapes on two CPU cores, in minutes: what runs/cpu.sh trains.

These settings differ from the defaults: they help clean shapes, not photographs (runs/LOG.md, 12).
"""

model_tag = "shapes_cpu"
data = "shapes"
depth = 4
width = 160
objective = "flow_x0"
timestep_shift = 1.3
timestep_std = 0.7
num_iterations = 700
total_batch_size = 64
lr = 3e-3
time_input = "1000t"
warmdown_ratio = 0.8
eval_every = 350
sample_every = 150
cfg_scale = 2.0
cfg_interval = "0.3,0.85"
sampler = "heun"  # ralston in 7 steps, as many evaluations, draws 2% fewer well formed (runs/LOG.md, 28)
sample_steps = 10
save_every = 350
