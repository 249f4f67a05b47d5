"""Tune a flow model of the shapes to sample in one to four steps.

A step costs over three of the flow model's steps, as the guided teacher is evaluated six times. So these 420 steps
take as long as the flow model's 1,400.
"""

model_tag = "few_steps_cpu"
init_from = "shapes_long"  # of runs/few_steps.sh
data = "shapes"
depth = 4
width = 160
objective = "flow_map_x0"
timestep_shift = 1.3
num_iterations = 420
total_batch_size = 64
lr = 1e-3
muon_lr = 0.01
warmdown_ratio = 0.8
eval_every = -1
sample_every = -1
cfg_scale = 2.0
cfg_interval = "0.3,0.85"
sample_steps = 4
save_every = 0
