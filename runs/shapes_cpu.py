"""The embedded shapes on two CPU cores, in minutes: what runs/cpu.sh trains."""

model_tag = "shapes_cpu"
data = "shapes"
depth = 3
num_iterations = 700
total_batch_size = 64
eval_every = 350
sample_every = 350
cfg_scale = 2.0
sample_steps = 10
save_every = 350
