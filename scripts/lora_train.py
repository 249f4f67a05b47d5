"""
Fine-tune a trained model by low-rank adapters (LoRA): settings, setup, loop, end; base_train's younger brother.

    python -m scripts.lora_train --base=cifar10_dit_d12 --data=photos                 # a run's averaged weights
    python -m scripts.lora_train --base=DiT-XL-2-256x256.pt --data=photos256_latents  # a published model
    torchrun --standalone --nproc_per_node=8 -m scripts.lora_train --base=... --data=...

Classes are matched by name; those that the base lacks are added. Running the same command again continues where it
stopped. It makes files of adapters, and a run that the other scripts take like any other.
"""

import math
import time
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path

import torch

from configurator import configure
from nanodiff.common import StopSignal, UserError, base_dir, get_dist, print0, sum_over_ranks
from nanodiff.data.dataloader import DataLoader
from nanodiff.data.dataset import open_dataset
from nanodiff.data.latents import check_same_data, load_codec
from nanodiff.device import choose_dtype, device_name, init_device
from nanodiff.diffusion.flow import FlowMatching
from nanodiff.diffusion.guidance import drop_labels
from nanodiff.diffusion.process import choose_sampler
from nanodiff.diffusion.sampling import SampleSettings, conditioning, quartile_sums, sample_grid
from nanodiff.diffusion.timesteps import make_timesteps
from nanodiff.files import load_tensors
from nanodiff.formats.adapters import identity, match_classes, save_adapters
from nanodiff.formats.load import load_run, load_weights
from nanodiff.models.build import check_settings
from nanodiff.models.lora import add_lora, class_table, trained
from nanodiff.training import run as training
from nanodiff.training.amp import LossScaler
from nanodiff.training.checkpoint import load_meta, lock_run, save_checkpoint
from nanodiff.training.optim import make_optimizer

# The run
run = "dummy"  # name of the wandb run; "dummy" = no wandb
model_tag = ""  # folder of this run under $NANODIFF_BASE_DIR/runs; "" = made from base and data
resume = "auto"  # auto|never or >= 0: from the newest checkpoint, not at all, or from that of a step
seed = 42  # >= 0: of the adapters, the order of the images, and all that is drawn
device_type = ""  # ""|cuda|cpu|mps: "" = the best that is present
dtype = "auto"  # auto|bfloat16|float16|float32: of the matrix products; adapters and weights stay in float32
compile = True  # torch.compile
rank_timeout = 600.0  # > 0: seconds that ranks wait for one that hangs, or draws a grid alone, before the run ends
# What is tuned
base = ""  # tag or folder of a run, or a published file
base_step = -1  # >= -1: step of its checkpoint; -1 = the newest
base_ema = ""  # which average of its weights: a rate, or raw; "" = the first rate
rank = 8  # >= 1: of the adapters
alpha = 0.0  # >= 0: they are scaled by alpha / rank; 0 = rank
targets = "all"  # linear layers with adapters, by the end of their names, such as qkv,proj,fc1,fc2,ada; all = every one
train_classes = "new"  # rows of the class table that learn: new|all|none, or names of classes, comma-separated
checkpointing = False  # recompute activations in the backward pass: less memory, a third more compute
# Data
data = ""  # name of a data set, or the path of its folder: images, or latents of the base's autoencoder
flip = False  # mirror half of the images
autoencoder = ""  # path of that of a latent base; "" = where it was when the latents were made
label_drop = -1.0  # [0, 1) or -1: fraction of labels replaced by the null class; -1 = as the base was trained
t_weighting = "auto"  # auto|none|bell: weigh the loss towards the middle of t; auto = bell for flow, none for the rest
t_min = 0.0  # [0, 1): train only on t from here, 0 being the image
t_max = 1.0  # (0, 1]: to here, 1 being noise
# Horizon: the first that is given counts
num_iterations = -1  # >= -1: optimisation steps
num_epochs = 1.0  # > 0: passes over the data
# Optimisation, by AdamW
total_batch_size = 64  # >= 1: images per step, over all ranks
device_batch_size = 64  # >= 1: images per forward pass of one rank
lr = 1e-3  # > 0: learning rate
weight_decay = 0.0  # >= 0: of the adapters
grad_clip = 1.0  # > 0 or -1: largest norm of the gradient; -1 = never clip
warmup_ratio = 0.02  # [0, 1]: fraction of the steps
warmdown_ratio = 0.2  # [0, 1]: fraction of the steps; 0 = the rate stays constant
# Every so many steps, 0 = only at the end, -1 = never
sample_every = 0  # >= -1: grid of samples
sample_steps = 25  # >= 1: of the sampler
cfg_scale = 2.0  # >= 0: classifier-free guidance of the samples; 1 = none
save_every = 0  # >= -1: a file of adapters, and a checkpoint to resume from
save_epochs = False  # and after every pass over the data
log_every = 10  # >= 1: steps between lines
defaults = configure(globals(), argv=[])  # so that config.json tells what was changed, and from what
config = configure(globals())

# ---------------------------------------------------------------------------------------------------------------------
# Setup: device, base, data, adapters

ddp_rank, _, world = get_dist()
device = init_device(device_type, rank_timeout)
compute_dtype = choose_dtype(dtype, device)
autocast = nullcontext() if compute_dtype == torch.float32 else torch.autocast(device.type, dtype=compute_dtype)
print0(f"device: {world} x {device_name(device)}, {str(compute_dtype)[6:]}, torch {torch.__version__}")
if not base or not data:
    raise UserError("give --base=..., a run or a published file, and --data=..., a data set")
if t_min >= t_max:
    raise UserError(f"t_min={t_min} and t_max={t_max}; accepted: t_min < t_max")

loaded = load_run(base, device, base_step, base_ema)
model, process, low_res_size, origin = loaded.model, loaded.process, loaded.config["low_res_size"], identity(loaded)
num_params, flops_per_image = sum(p.numel() for p in model.parameters()), model.estimate_flops()
flops_per_image = flops_per_image * 2 // 3  # no gradients of frozen weights; the adapters' own share is small
print0(f"base: {origin['name']}: {num_params:,} parameters")

train_set = open_dataset(data, "train")
if flip and train_set.meta["kind"] == "latents" and train_set.meta["latents"]["copies"] < 2:
    raise UserError(f"flip: {data!r} has no mirrored copies; make it by scripts.cache_latents --flip")
codec = load_codec(loaded.data, device, autoencoder, train_set)
train_set, class_names, class_rows = match_classes(loaded, train_set, train_classes)
num_classes, label_drop = len(class_names), loaded.config["label_drop"] if label_drop < 0 else label_drop
if num_classes and label_drop and len(class_table(model)[1].weight) == num_classes:
    raise UserError(f"label_drop={label_drop}, but {origin['name']} has no null class; accepted: 0")
facts = codec.facts | dict(name=train_set.name, class_names=class_names, num_classes=num_classes)
learned = [class_names[i] if i < num_classes else None for i in class_rows]  # None: the null class
print0(f"data: {data}: {len(train_set):,} images of {codec.shape}; rows of the class table that learn: {learned}")

alpha = alpha or float(rank)
add_lora(model, rank, alpha, targets, class_rows, seed)
model.config = replace(model.config, checkpointing=checkpointing)
num_trained = sum(p.numel() for p in trained(model).values())
print0(f"adapters: rank {rank}: {num_trained:,} parameters, {100 * num_trained / num_params:.1f}% of the base's")

device_batch_size, grad_accum_steps = training.cut_batch(total_batch_size, device_batch_size, world)
print0(f"batch: {device_batch_size} x {world} ranks x {grad_accum_steps} micro-steps = {total_batch_size:,} images")
if num_iterations < 0:
    num_iterations = math.ceil(num_epochs * len(train_set) / total_batch_size)
print0(f"steps: {num_iterations:,}, or {num_iterations * total_batch_size / len(train_set):.1f} epochs")

bell = t_weighting == "bell" or (t_weighting == "auto" and isinstance(process, FlowMatching))
timestep_sampler = make_timesteps("bell" if bell else "uniform", process, low=t_min, high=t_max)
optim = make_optimizer(model, "adamw", lr=lr, weight_decay=weight_decay, betas=(0.9, 0.99))
scaler = LossScaler(enabled=compute_dtype == torch.float16)
sampler = choose_sampler(process, "auto", sample_steps)

# ---------------------------------------------------------------------------------------------------------------------
# The run folder: one trainer at a time, resumed from its newest intact checkpoint

FIXED = (
    "seed", "data", "flip", "base", "rank", "alpha", "targets", "train_classes", "label_drop", "t_weighting", "t_min",
    "t_max", "total_batch_size",
)  # fmt: skip
model_tag = model_tag or f"{loaded.run_dir.name if loaded.run_dir else Path(base).stem}_{Path(data).name}_lora"
run_dir = base_dir() / "runs" / model_tag
lock = lock_run(run_dir) if ddp_rank == 0 else None
checkpoint = training.resume_point(run_dir, resume)
loop = {"step": 0, "train_time_s": 0.0, "wandb_id": None}  # all state of the loop that is not in tensors
if checkpoint:
    meta = load_meta(checkpoint)
    if "lora" not in meta:
        raise UserError(f"{model_tag} is a run of base_train; use another model_tag")
    changes = check_settings(config, meta["config"], model_tag, FIXED)
    check_same_data(meta["data"], facts, model_tag)
    if meta["lora"]["sha256"] != origin["sha256"]:
        raise UserError(f"{model_tag} was trained on {meta['lora']['name']}, not on {origin['name']}; see base_step")
    print0(f"resumed from {checkpoint}" + f", now with {', '.join(changes)}" * bool(changes))
    load_weights(model, model.state_dict() | load_tensors(checkpoint / "model.pt"), checkpoint)
    optim.load_state_dict(load_tensors(checkpoint / "optim.pt"))
    scaler.load_state_dict(load_tensors(checkpoint / "train.pt")["scaler"])
    loop |= meta["loop"]
optim.check_replicas()  # all ranks start from the same weights, bit for bit
step = start_step = loop["step"]
described = dict(config=config, data=facts, model=asdict(model.config), lora=origin, num_params=num_params)
described |= dict(num_trained=num_trained, num_iterations=num_iterations, flops_per_image=flops_per_image)
log = training.RunLog(run, run_dir, device, described, defaults, step, loop["wandb_id"])
loop["wandb_id"] = log.wandb_id

# ---------------------------------------------------------------------------------------------------------------------
# The loop

raw_model = model.train()
model = training.compiled(raw_model, device) if compile else raw_model
guidance = cfg_scale if num_classes and label_drop else 1.0
loader = DataLoader(train_set, device_batch_size, total_batch_size, ddp_rank, world, seed, step, device)
images, labels = next(loader)  # (B, C, H, W) as stored, (B,) int64
stop, stopping = StopSignal(), False
since_log = [0, 0.0, 0.0]  # steps, seconds, and seconds of waiting for data since the last line


def due(every):
    """Is it time for what happens every so many steps (0 = only at the end, -1 = never)?"""
    return every >= 0 and (step == num_iterations or (every > 0 and step > 0 and step % every == 0))


while True:
    epoch_ended = save_epochs and step > 0 and step * total_batch_size % len(train_set) < total_batch_size
    if (due(save_every) or epoch_ended or (stopping and save_every >= 0)) and (step > start_step or not checkpoint):
        optimizer_state = optim.state_dict()  # gathered over ranks: all take part
        if ddp_rank == 0:
            path = run_dir / "adapters" / f"step_{step:06d}.safetensors"  # all of them stay
            save_adapters(path, raw_model, rank, alpha, targets, learned, origin)
            tensors = dict(model=trained(raw_model), optim=optimizer_state, train=dict(scaler=scaler.state_dict()))
            meta = dict(config=config, data=facts, lora=origin, arch="lora", model_config=asdict(raw_model.config))
            meta |= dict(step=step, ema_rates=[], loop=loop | {"step": step})
            save_checkpoint(run_dir, step, tensors, meta, keep=2)
            print0(f"saved {path}: {path.stat().st_size / 2**20:.2f} MiB")

    if due(sample_every) and not stopping and ddp_rank == 0:
        settings = SampleSettings(sample_steps, sampler, guidance)
        with autocast:
            grid = sample_grid(raw_model, process, train_set, codec, settings, device_batch_size)
        log.grid(grid, step)

    log.report(last=bool(stopping) or due(0))

    if step >= num_iterations or stopping:
        break

    t0, wait_s = time.perf_counter(), 0.0
    draw = training.draw_step(seed, step, total_batch_size, codec, device)
    t, t_weight = timestep_sampler.sample(draw.u_t)
    micro_steps = []
    for micro_step in range(grad_accum_steps):
        first = (micro_step * world + ddp_rank) * device_batch_size
        rows = slice(first, first + device_batch_size)
        eps = draw.eps[rows] if codec.stochastic else None
        x0 = codec.to_x0(images, draw.u_flip[rows] < 0.5 if flip else None, eps)  # (B, C, H, W)
        y = drop_labels(labels, draw.u_drop[rows], label_drop, num_classes)
        with autocast:
            cond = conditioning(raw_model.config, x0, y)
            terms = process.losses(model, x0, t[rows], draw.noise[rows], **cond)
        terms["loss"] = terms["loss"] * t_weight[rows]  # (B,)
        scaler.scale(terms["loss"].mean() / grad_accum_steps).backward()
        micro_steps.append({name: x.detach() for name, x in terms.items()} | {"t": t[rows]})
        images, labels = next(loader)  # the next micro-batch, while the device is busy with this one
        wait_s += loader.data_wait
    lrm = training.trapezoid(step, num_iterations, warmup_ratio, warmdown_ratio)
    grad_norm = float(optim.sync_grads()) * scaler.inv_scale  # the only exchange of gradients; waits for the device
    overflow = not math.isfinite(grad_norm)
    if overflow and not scaler.enabled:
        raise FloatingPointError(f"step {step}: gradient not finite ({optim.not_finite()}); no update was done")
    for group in optim.param_groups:
        group["lr"] = group["initial_lr"] * lrm
    if not overflow:
        clip = min(1.0, grad_clip / (grad_norm + 1e-6)) if grad_clip > 0 else 1.0
        optim.step(grad_scale=clip * scaler.inv_scale)
    scaler.update(overflow)
    optim.zero_grad(set_to_none=True)
    stopping = stop.agreed(device)  # a signal to one rank stops all, after the same step
    step += 1
    dt = time.perf_counter() - t0
    loop["train_time_s"] += dt
    since_log = [a + b for a, b in zip(since_log, (1, dt, wait_s))]

    if step % log_every == 0 or step == num_iterations or stopping:
        terms = {name: torch.cat([m[name] for m in micro_steps]) for name in micro_steps[0]}
        step_t = terms.pop("t")
        sums = {name: sum_over_ranks(quartile_sums(step_t, x, process), device) for name, x in terms.items()}
        speed = flops_per_image, device, loop["train_time_s"], since_log
        line = training.metrics_line(step, total_batch_size, *speed, sums, grad_norm, lrm, scaler)
        log.metrics(line)
        print0(training.console_line(line, num_iterations))
        since_log = [0, 0.0, 0.0]

# ---------------------------------------------------------------------------------------------------------------------
# The end

loader.close()
log.finish()
training.end(step, stopping, loop["train_time_s"], device, run_dir)
