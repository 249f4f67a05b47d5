"""The embedded shapes on two CPU cores, in under five minutes: what runs/cpu.sh trains."""

model_tag = "shapes_cpu"
data = "shapes"
depth = 4
num_iterations = 1000
total_batch_size = 64
eval_every = 500
sample_every = 250
sample_steps = 10
save_every = 250
