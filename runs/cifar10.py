"""CIFAR-10 on one GPU: what runs/cifar10.sh trains. Meant for about ten minutes; not yet timed."""

model_tag = "cifar10"
data = "cifar10"
depth = 8
flip = True
num_iterations = 10000
total_batch_size = 512
device_batch_size = 512
ema_rates = "0.9995"
eval_every = 2000
sample_every = 2000
save_every = 2000
