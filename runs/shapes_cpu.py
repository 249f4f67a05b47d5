"""The embedded shapes on two CPU cores, in minutes: what runs/cpu.sh trains."""

model_tag = "shapes_cpu"
data = "shapes"
depth = 3
num_iterations = 800
total_batch_size = 64
eval_every = 400
sample_every = 400
cfg_scale = 2.0
sample_steps = 10
save_every = 400
