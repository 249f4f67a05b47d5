"""
Fine-tune a trained model with low-rank adapters (LoRA): settings, setup, loop, end.

    python -m scripts.lora_train --base=cifar10_dit_d12 --data=photos                 # a run's averaged weights
    python -m scripts.lora_train --base=DiT-XL-2-256x256.pt --data=photos256_latents  # a published model

Classes are matched by name; those that the base lacks are added. Rerunning the same command resumes.
The result is a file of adapters, and a run like any other. The step is base_train's, and explained there. This is a
script of its own since here model, process and classes come from the base, there from settings: half of the settings
of either would do nothing in the other.
"""

import functools
import math
from dataclasses import asdict, replace
from pathlib import Path

import torch

from configurator import configure
from nanodiff.common import StopSignal, UserError, draw_rows, get_dist, make_generator, print0
from nanodiff.data.codec import check_same_data, load_codec
from nanodiff.data.dataloader import DataLoader
from nanodiff.data.dataset import open_dataset
from nanodiff.device import autocast_to, choose_dtype, device_name, host_copy, init_device, peak_flops
from nanodiff.diffusion.guidance import choose_guidance, conditioning, why_unguided
from nanodiff.diffusion.process import choose_sampler
from nanodiff.diffusion.timesteps import make_timesteps
from nanodiff.files import load_tensors
from nanodiff.formats.adapters import identity, match_classes, save_adapters, start_from_adapters
from nanodiff.formats.load import load_run, load_weights, shift_timesteps
from nanodiff.models.build import compiled, uncompiled
from nanodiff.models.lora import add_lora, class_table, trained
from nanodiff.sampling.draw import SampleSettings, sample_grid
from nanodiff.training.checkpoint import Saver, lock_run
from nanodiff.training.log import Meter, RunLog, check_wandb, end
from nanodiff.training.optim import LossScaler, make_optimizer
from nanodiff.training.resume import check_settings, cut_batch, last_step, resume_point, run_folder
from nanodiff.web.report import LiveReport

# The run
run = "dummy"  # name of the wandb run; "dummy" = no wandb
model_tag = ""  # folder of this run under $NANODIFF_BASE_DIR/runs; "" = made from base and data
resume = "auto"  # auto|never|changed or >= 0: auto = from the newest checkpoint; changed = with other rates; or a step
seed = 42  # >= 0: seed of the adapters, the order of the images and all noise
device_type = ""  # ""|cuda|cpu|mps: "" = the best available
dtype = "auto"  # auto|bfloat16|float16|float32: dtype of the matrix products; adapters and weights stay fp32
compile = "True"  # True|False|max: torch.compile; max = time several kernels for each matrix product first, for minutes
deterministic = False  # bitwise reproducible on CUDA, but slower
# What is tuned
base = ""  # tag or folder of a run, or a published file
base_step = "newest"  # newest|best or >= 0: which of its checkpoints, or its step
base_ema = ""  # which average of its weights: a rate, or raw; "" = the first rate
rank = 8  # >= 1: rank of the adapters
alpha = 0.0  # >= 0: adapters are scaled by alpha / rank; 0 = rank
targets = "all"  # linear layers to adapt, by name suffix, such as qkv,proj,fc1,fc2,ada; or all
train_classes = "new"  # rows of the class table to train: new|all|none, or class names, comma-separated
init_from = ""  # adapter file for this base to continue from; "" = new ones
checkpointing = False  # recompute activations in the backward pass: less memory, a third more compute
# Data
data = ""  # name of a data set, or the path of its folder: images, or latents of the base's autoencoder
flip = False  # mirror half of the images left-right
autoencoder = ""  # path of a latent base's VAE; "" = where it was when the latents were made
label_drop = -1.0  # [0, 1) or -1: fraction of labels replaced by the null class; -1 = as the base was trained
t_weighting = "auto"  # auto|none|bell: weigh the loss towards the middle of t; auto = bell for flow, else none
timestep_shift = 0.0  # >= 0: a flow model's shift, in training and sampling; 0 = the base's
t_min = 0.0  # [0, 1): lowest t to train on; 0 is the image
t_max = 1.0  # (0, 1]: highest; 1 is noise
# Horizon: the first that is set counts
num_iterations = -1  # >= -1: optimisation steps
num_epochs = 1.0  # > 0: passes over the data
# Optimisation, by AdamW
total_batch_size = 64  # >= 1: images per step, over all ranks
device_batch_size = 64  # >= 1: images per forward pass of one rank
lr = 1e-3  # > 0: learning rate
weight_decay = 0.0  # >= 0: decoupled, on the adapters
grad_clip = 1.0  # > 0 or -1: largest global norm of the gradient; -1 = never clip
warmup_ratio = 0.02  # [0, 1]: fraction of the steps
warmdown_ratio = 0.2  # [0, 1]: fraction of the steps; 0 = the rate stays constant
# Every so many steps; 0 = only at the end, -1 = never
sample_every = 0  # >= -1: grid of samples
sample_steps = 25  # >= 1: steps of the sampler
cfg_scale = 2.0  # [0, 100]: classifier-free guidance of the samples; 1 = none
save_every = 0  # >= -1: a file of adapters, and a checkpoint to resume from
save_epochs = False  # save also after every pass over the data
log_every = 10  # >= 1: steps between log lines

config = configure(globals())

# ---------------------------------------------------------------------------------------------------------------------
# Setup: device, base, data, adapters

ddp_rank, _, world = get_dist()
check_wandb(run)
device = init_device(device_type, deterministic=deterministic)
compute_dtype = choose_dtype(dtype, device)
autocast = autocast_to(device, compute_dtype)
peak, _ = peak_flops(device, compute_dtype)
print0(f"device: {world} x {device_name(device)}, {compute_dtype}, torch {torch.__version__}")
if not base or not data:
    raise UserError("give --base=..., a run or a published file, and --data=..., a data set")
if t_min >= t_max:
    raise UserError(f"t_min={t_min} and t_max={t_max}; accepted: t_min < t_max")

loaded = load_run(base, device, base_step, base_ema)
if loaded.config["objective"].startswith("flow_map"):
    raise UserError(f"{loaded.source} is a flow map; tune the flow run that it was made from")
if timestep_shift:
    shift_timesteps(loaded, timestep_shift)
raw_model, process, origin = loaded.model, loaded.process, identity(loaded)
num_params = sum(p.numel() for p in raw_model.parameters())
flops_per_image = raw_model.estimate_flops() * 2 // 3  # no gradients of frozen weights; adapters are small
print0(f"base: {origin['name']}: {num_params:,} parameters")

train_set = open_dataset(data, "train")
if flip and train_set.meta["kind"] == "latents" and train_set.meta["latents"]["copies"] < 2:
    raise UserError(f"flip: {data!r} has no mirrored copies; make it with scripts.cache_latents --flip")
codec = load_codec(loaded.data, device, autoencoder, train_set)
train_set, class_names, class_rows = match_classes(loaded, train_set, train_classes)
num_classes = len(class_names)
if label_drop < 0:
    label_drop = loaded.config["label_drop"]
if num_classes and label_drop and len(class_table(raw_model)[1].weight) == num_classes:
    raise UserError(f"label_drop={label_drop}, but {origin['name']} has no null class; accepted: 0")
facts = codec.description | dict(name=train_set.name, sha256=train_set.sha256)
facts |= dict(class_names=class_names, num_classes=num_classes)
learned = [class_names[i] if i < num_classes else None for i in class_rows]  # None: the null class
shapes = ", ".join("x".join(map(str, shape)) for shape in codec.shapes)
print0(f"data: {data}: {len(train_set):,} images of {shapes}; rows of the class table that learn: {learned}")

alpha = alpha or float(rank)
add_lora(raw_model, rank, alpha, targets, class_rows, seed)
if init_from:
    start_from_adapters(raw_model, init_from, alpha / rank, origin, class_names)
raw_model.config = model_config = replace(raw_model.config, checkpointing=checkpointing)
num_trained = sum(p.numel() for p in trained(raw_model).values())
print0(f"adapters: rank {rank}: {num_trained:,} parameters, {100 * num_trained / num_params:.1f}% of the base's")

device_batch_size, grad_accum_steps = cut_batch(total_batch_size, device_batch_size, world)
print0(f"batch: {device_batch_size} x {world} ranks x {grad_accum_steps} micro-steps = {total_batch_size:,} images")
if num_iterations < 0:
    num_iterations = max(1, round(num_epochs * len(train_set) / total_batch_size))
print0(f"steps: {num_iterations:,}, or {num_iterations * total_batch_size / len(train_set):.1f} epochs")
if save_every < 0:
    print0("warning: save_every=-1: this run saves no adapters, so nothing to sample from or to resume")

bell = t_weighting == "bell" or (t_weighting == "auto" and process.num_timesteps == 0)
timestep_sampler = make_timesteps("bell" if bell else "uniform", process, low=t_min, high=t_max)
optim = make_optimizer(raw_model, "adamw", lr=lr, weight_decay=weight_decay, betas=(0.9, 0.99))
scaler = LossScaler(enabled=compute_dtype == torch.float16)
guidance = choose_guidance(
    config.given.get("cfg_scale"), "0,1", why_unguided({"label_drop": label_drop}, loaded.has_condition)
)
sample_settings = SampleSettings(sample_steps, choose_sampler(process, "auto", sample_steps), *guidance)

# ---------------------------------------------------------------------------------------------------------------------
# The run folder: one trainer at a time, resumed from its newest intact checkpoint

model_tag = model_tag or f"{loaded.run_dir.name if loaded.run_dir else Path(base).stem}_{Path(data).name}_lora"
run_dir = run_folder(model_tag)
lock = lock_run(run_dir) if ddp_rank == 0 else None
checkpoint, meta = resume_point(run_dir, resume, "lora_train")
progress = {"step": 0, "train_time_s": 0.0, "wandb_id": None, "lines": 0, "running_loss": 0.0}
if checkpoint:
    check_settings(checkpoint, meta, config)
    check_same_data(meta["data"], facts, model_tag)
    if meta["lora"]["sha256"] != origin["sha256"]:
        raise UserError(f"{model_tag} was trained on {meta['lora']['name']}, not on {origin['name']}; see base_step")
    load_weights(raw_model, raw_model.state_dict() | load_tensors(checkpoint / "model.pt"), checkpoint)
    optim.load_state_dict(load_tensors(checkpoint / "optim.pt"))
    scaler.load_state_dict(load_tensors(checkpoint / "train.pt")["scaler"])
    progress |= meta["loop"]
step = start_step = progress["step"]
num_iterations = last_step(checkpoint, step, num_iterations)
described = dict(config=config, data=facts, model=asdict(model_config), lora=origin, num_params=num_params)
described |= dict(num_trained=num_trained, num_iterations=num_iterations, flops_per_image=flops_per_image)
log = RunLog(run, run_dir, device, described, step, progress["wandb_id"])
progress["wandb_id"] = log.wandb_id
report = LiveReport(run_dir)

# ---------------------------------------------------------------------------------------------------------------------
# The loop


def due(every):
    """Is it time for what happens every so many steps (0 = only at the end, -1 = never)?"""
    return every >= 0 and (step == num_iterations or (every > 0 and step > 0 and step % every == 0))


def lr_multiplier(s):
    """Linear warmup, constant, linear warmdown to 0."""
    warmup = warmup_ratio * num_iterations
    warmdown = warmdown_ratio * num_iterations
    if s < warmup:
        return (s + 1) / (warmup + 1)
    if s <= num_iterations - warmdown:
        return 1.0
    return (num_iterations - s) / warmdown


raw_model.train()
model = compiled(raw_model, device, num_iterations, compile)
draw_device = device if device.type == "cuda" else torch.device("cpu")
loader = DataLoader(train_set, device_batch_size, total_batch_size, ddp_rank, world, seed, step, device)
images, labels, vectors = next(loader)  # (B, C, H, W) as stored, (B,)
stop = StopSignal()
stopping = False
meter = Meter(process, device, progress)
NOISE, VAE_NOISE = 1, 2  # streams of random numbers
saved_step = start_step if checkpoint else -1
saver = Saver()

while True:
    epoch_ended = save_epochs and step > 0 and step * total_batch_size % len(train_set) < total_batch_size
    if (due(save_every) or epoch_ended or (stopping and save_every >= 0)) and step != saved_step:
        optim_state = optim.state_dict()  # of all ranks
        if ddp_rank == 0:
            path = run_dir / "adapters" / f"step_{step:06d}.safetensors"
            save_adapters(path, raw_model, rank, alpha, targets, learned, origin)
            tensors = dict(
                model=host_copy(trained(raw_model)), optim=optim_state, train=dict(scaler=scaler.state_dict())
            )
            meta = dict(step=step, arch="lora", config=config, model_config=asdict(model_config), data=facts)
            meta |= dict(lora=origin, ema_rates=[], loop=progress | {"step": step})
            saver.start(run_dir, step, tensors, meta, keep=2)
            print0(f"saved {path}: {path.stat().st_size / 2**20:.2f} MiB")
        saved_step = step

    if due(sample_every) and not stopping:
        with autocast, uncompiled():
            grid = sample_grid(raw_model, process, train_set, codec, sample_settings, device_batch_size)
        log.grid(grid, step)

    leaving = step >= num_iterations or stopping
    if ddp_rank == 0 and (leaving or due(sample_every)):
        report.refresh(leaving)
    if leaving:
        break

    saver.check()
    meter.start_step()
    g = make_generator(seed, step, device=draw_device)
    u_flip, u_t, u_drop = torch.rand(3, total_batch_size, generator=g, device=draw_device).to(device)
    t, t_weight = timestep_sampler.sample(u_t)
    for micro_step in range(grad_accum_steps):
        first = (micro_step * world + ddp_rank) * device_batch_size
        rows = slice(first, first + device_batch_size)
        flips = u_flip[rows] < 0.5 if flip else None
        vae_noise = functools.partial(draw_rows, (seed, step, VAE_NOISE), first, draw_device)
        x0 = codec.to_x0(images, flips, vae_noise)  # (B, C, H, W)
        noise = draw_rows((seed, step, NOISE), first, draw_device, x0)
        cond = conditioning(model_config, x0, labels, vectors, dropped=u_drop[rows] < label_drop)
        with autocast:
            terms = process.losses(model, x0, t[rows], noise, **cond)
        loss = (terms["loss"] * t_weight[rows]).mean() / grad_accum_steps
        optim.last_micro_step = micro_step == grad_accum_steps - 1
        scaler.scale(loss).backward()
        images, labels, vectors = next(loader)
        meter.add(t[rows], t_weight[rows], terms, loader.data_wait)
    timestep_sampler.update(*meter.losses())

    grad_norm, stopping = optim.sync_grads(bool(stop.received))
    grad_norm *= scaler.inv_scale
    is_finite = math.isfinite(grad_norm)
    if not is_finite and not scaler.enabled:
        where = optim.not_finite()
        raise FloatingPointError(f"step {step}: loss {loss.item():g}, gradient not finite ({where})")

    lrm = lr_multiplier(step)
    for group in optim.param_groups:
        group["lr"] = group["initial_lr"] * lrm
    if is_finite:
        clip = min(1.0, grad_clip / (grad_norm + 1e-6)) if grad_clip > 0 else 1.0
        optim.step(grad_scale=clip * scaler.inv_scale)
    scaler.update(overflow=not is_finite)
    optim.zero_grad()

    step += 1
    log_now = step % log_every == 0 or step == num_iterations or stopping
    meter.end_step(x0.shape, log_now)
    if log_now:
        line = meter.line(step, total_batch_size, flops_per_image, peak * world)
        line["train/grad_norm"] = grad_norm
        line["train/lrm"] = lrm
        if scaler.enabled:
            line["train/lg_loss_scale"] = scaler.lg_loss_scale
        log.metrics(line)
        print0(meter.console(line, num_iterations))

loader.close()
saver.wait()
end(log, step, stopping, progress["train_time_s"], device, saved=saved_step == step)
