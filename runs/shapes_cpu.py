"""The embedded shapes on two CPU cores, with native bf16 in under five minutes: what runs/cpu.sh trains."""

model_tag = "shapes_cpu"
data = "shapes"
depth = 3
num_iterations = 2300
total_batch_size = 64
eval_every = 1150
sample_every = 575
cfg_scale = 3.0
sample_steps = 10
save_every = 575
