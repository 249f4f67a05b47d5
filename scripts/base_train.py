"""
Train an image diffusion model: settings, setup, loop, end. Read it top to bottom.

    python -m scripts.base_train                                # the embedded data set, on whatever device is here
    python -m scripts.base_train runs/cifar10_cpu.py --num_iterations=500
    torchrun --standalone --nproc_per_node=8 -m scripts.base_train --data=cifar10 --depth=12

Running the same command again continues where the run stopped.
"""

import gc
import math
import time
from contextlib import nullcontext
from dataclasses import asdict

import torch

from configurator import configure
from nanodiff.common import StopSignal, UserError, base_dir, get_dist, make_generator, print0, sum_over_ranks
from nanodiff.data.dataloader import DataLoader
from nanodiff.data.dataset import open_dataset
from nanodiff.data.latents import check_same_data, make_codec
from nanodiff.device import choose_dtype, device_name, init_device, peak_flops
from nanodiff.diffusion.guidance import drop_labels
from nanodiff.diffusion.process import choose_sampler, make_process
from nanodiff.diffusion.sampling import (
    SampleSettings,
    bits_per_dim,
    conditioning,
    quartile_sums,
    sample_grid,
    validation_loss,
)
from nanodiff.diffusion.timesteps import make_timesteps
from nanodiff.files import load_tensors
from nanodiff.formats.load import load_weights
from nanodiff.metrics.features import FrechetDistance
from nanodiff.models.build import build_model, check_settings, make_model_config
from nanodiff.training.amp import LossScaler
from nanodiff.training.checkpoint import load_meta, lock_run, save_checkpoint
from nanodiff.training.ema import EMA
from nanodiff.training.optim import make_optimizer
from nanodiff.training.run import (
    RunLog,
    compiled,
    console_line,
    cut_batch,
    draw_step,
    end,
    largest_batch,
    metrics_line,
    resume_point,
    trapezoid,
)

# ---------------------------------------------------------------------------------------------------------------------
# Settings: each can be given in a preset file or as --key=value

# The run
run = "dummy"  # name of the wandb run; "dummy" = no wandb
model_tag = ""  # folder of this run under $NANODIFF_BASE_DIR/runs; "" = made from data, arch and depth
resume = "auto"  # auto|never or >= 0: from the newest checkpoint, not at all, or from that of a step
seed = 42  # >= 0: of the weights, the order of the images, and all that is drawn
device_type = ""  # ""|cuda|cpu|mps: "" = the best that is present
dtype = "auto"  # auto|bfloat16|float16|float32: of the matrix products; weights and their averages stay in float32
compile = True  # torch.compile
rank_timeout = 600.0  # > 0: seconds that ranks wait for one that hangs, or draws a grid alone, before the run ends
# Data
data = "shapes"  # name of a data set (see scripts/prepare_data.py), or the path of its folder
flip = False  # mirror half of the images
autoencoder = ""  # path: make latents of an image set on the fly; or where that of a latent set lies now
latent_norm = "channels"  # channels|scale: latents are normalised by the set's statistics, or as the autoencoder says
class_cond = True  # condition on labels where the data set has them
low_res_size = 0  # >= 0: train super-resolution from this size in pixels; 0 = off
# Model
arch = "dit"  # dit|dit_classic|unet: modern DiT, DiT as published, IDDPM's UNet
depth = 4  # >= 1: the dial: a DiT has depth blocks of width 64*depth, a UNet 32*depth channels
width = 0  # >= 0: of a DiT off the dial, such as DiT-XL's 1152 at depth 28; 0 = 64*depth
heads = 0  # >= 0: of a DiT's attention; 0 = one per 64 of width
patch_size = 0  # >= 0: side of a DiT token in pixels or latents; 0 = for about 256 tokens
num_res_blocks = 3  # >= 1: of the UNet, per resolution
attention_resolutions = "16,8"  # of the UNet, in pixels of its feature maps, comma-separated
num_heads = 4  # >= 1: of the UNet's attention
num_heads_upsample = 0  # >= 0: on the way up; 0 = num_heads
use_scale_shift_norm = True  # the UNet takes t as scale and shift of a norm, rather than as a sum
dropout = 0.0  # [0, 1): of the UNet
checkpointing = False  # recompute activations in the backward pass: less memory, a third more compute
# Process
objective = "flow"  # flow|flow_x0|eps|x0|x_prev|v: flow matching, or a Gaussian diffusion whose network predicts this
flow_prediction = "v"  # v|x0: what the network puts out under flow matching; the loss is on v
noise_schedule = "cosine"  # linear|cosine: betas of the Gaussian diffusion
num_timesteps = 1000  # >= 1: of the Gaussian diffusion
variance = "fixed_small"  # fixed_small|fixed_large|learned|learned_range: of its reverse steps
loss = "mse"  # mse|rescaled_mse|kl|rescaled_kl: mse with a learned variance is the hybrid loss
rescale_timesteps = True  # the network sees t in [0, 1000) whatever num_timesteps is
timesteps = "auto"  # auto|uniform|logit-normal|loss-second-moment: which t to train on; auto = logit-normal for flow
label_drop = 0.1  # [0, 1): fraction of labels replaced by the null class, for classifier-free guidance
# Horizon: the first that is given counts
num_iterations = -1  # >= -1: optimisation steps
target_flops = -1.0  # > 0 or -1: FLOPs of the whole training
target_param_data_ratio = 12.0  # > 0 or -1: image tokens per parameter
# Optimisation
total_batch_size = 64  # >= 1: images per step, over all ranks
device_batch_size = 64  # >= 0: images per forward pass of one rank; 0 = the most that fit into its memory
optimizer = "muon"  # muon|adamw: Muon for the matrices of the blocks and AdamW for the rest, or AdamW for all
lr = 3e-3  # > 0: of AdamW
muon_lr = 0.02  # > 0: of Muon
weight_decay = 0.0  # >= 0: of matrices
beta1 = 0.9  # [0, 1): AdamW's decay rate of the mean gradient
beta2 = 0.95  # [0, 1): and of its square
grad_clip = 1.0  # > 0 or -1: largest norm of the gradient; -1 = never clip
lr_schedule = "trapezoid"  # trapezoid|linear: warmup, constant, warmdown; or straight down to 0 (IDDPM's anneal)
warmup_ratio = 0.02  # [0, 1]: fraction of the steps
warmdown_ratio = 0.5  # [0, 1]: fraction of the steps
final_lr_frac = 0.0  # [0, 1]: learning rate at the end, relative to the full one
ema_rates = "0.999"  # weight averages to keep, comma-separated; the first is the one evaluated; "" = none
ema_ramp = True  # shorter averages early on, so that early samples are not the initial weights
# Evaluation: every so many steps, 0 = only at the end, -1 = never
eval_every = 250  # >= -1: validation loss
eval_images = 1024  # >= 1: validation images it is taken over
bpd_every = -1  # >= -1: bits/dim, of a Gaussian diffusion
bpd_images = 64  # >= 1: validation images it is taken over, each at every timestep
fid_every = -1  # >= -1: Frechet distance of samples, drawn like those of the grid, to the training images
fid_images = 2000  # >= 2: samples it is taken over
fid_metric = "fid"  # fid|fd_classifier: as Inception sees them, a download, or a classifier trained on the labelled set
sample_every = 250  # >= -1: grid of samples
sample_steps = 25  # >= 1: of the sampler
sampler = "auto"  # auto|euler|heun|sde|ddpm|ddim|dpm++: auto = heun for flow, ddim for the rest
cfg_scale = 2.0  # >= 0: classifier-free guidance of the samples; 1 = none
save_every = 1000  # >= -1: checkpoint
checkpoints_kept = 2  # >= 1 or -1: the newest that stay; -1 = all
log_every = 10  # >= 1: steps between lines

defaults = configure(globals(), argv=[])  # so that config.json tells what was changed, and from what
config = configure(globals())

# ---------------------------------------------------------------------------------------------------------------------
# Setup: device, data, model, sizes

rank, local_rank, world = get_dist()
device = init_device(device_type, rank_timeout)
compute_dtype = choose_dtype(dtype, device)
autocast = nullcontext() if compute_dtype == torch.float32 else torch.autocast(device.type, dtype=compute_dtype)
peak = peak_flops(device)
print0(f"device: {world} x {device_name(device)}, {str(compute_dtype)[6:]}, torch {torch.__version__}")
print0(f"peak: {peak:.3g} FLOP/s in bf16" if peak else "peak: unknown for this device, so mfu is shown as 0")

train_set, val_set = open_dataset(data, "train"), open_dataset(data, "val")
codec = make_codec(train_set, device, autoencoder, latent_norm, flip)  # what is stored <-> x0 <-> pixels
facts = codec.facts
num_classes = facts["num_classes"] if class_cond else 0
print0(f"data: {data}: {len(train_set):,} + {len(val_set):,} images of {codec.shape}, {num_classes or 'no'} classes")
if codec.undecodable:
    print0(f"grids will show latents, not pixels: {codec.undecodable}")

process = make_process(config, facts)
model_config = make_model_config(config, facts, process.out_channels(facts["channels"]))
model = raw_model = build_model(model_config, device, seed)
num_params, flops_per_image = sum(p.numel() for p in model.parameters()), raw_model.estimate_flops()
print0(f"model: {arch} d{depth}: {num_params:,} parameters, {flops_per_image:.3e} FLOPs per image (forward + backward)")

if num_iterations < 0:
    if target_flops > 0:
        num_iterations = round(target_flops / (flops_per_image * total_batch_size))
        print0(f"steps: {target_flops:.3e} FLOPs / ({flops_per_image:.3e} x {total_batch_size:,}) = {num_iterations:,}")
    elif target_param_data_ratio > 0:
        tokens = model_config.num_tokens  # per image
        num_iterations = round(target_param_data_ratio * num_params / (tokens * total_batch_size))
        sizes = f"{num_params:,} / ({tokens} tokens x {total_batch_size:,})"
        print0(f"steps: {target_param_data_ratio:g} x {sizes} = {num_iterations:,}")
    else:
        raise UserError("no horizon: give num_iterations, target_flops or target_param_data_ratio")
total_images = num_iterations * total_batch_size
epochs = total_images / len(train_set)
print0(f"images: {num_iterations:,} x {total_batch_size:,} = {total_images:,} ({epochs:.1f} epochs)")

timestep_sampler = make_timesteps(
    ("logit-normal" if objective.startswith("flow") else "uniform") if timesteps == "auto" else timesteps, process
)
optim = make_optimizer(model, optimizer, lr=lr, muon_lr=muon_lr, weight_decay=weight_decay, betas=(beta1, beta2))
ema = EMA(model, ema_rates, ramp=ema_ramp)
scaler = LossScaler(enabled=compute_dtype == torch.float16)
if device_batch_size == 0:

    def forward_backward(n):
        y, t = (
            torch.zeros(n, dtype=torch.int64, device=device),
            timestep_sampler.sample(torch.rand(n, device=device))[0],
        )
        x0 = noise = torch.randn(n, *codec.shape, device=device)
        with autocast:
            loss = process.losses(model, x0, t, noise, **conditioning(model_config, x0, y))["loss"]
        loss.mean().backward()

    device_batch_size = largest_batch(forward_backward, total_batch_size // world, optim.zero_grad)
device_batch_size, grad_accum_steps = cut_batch(total_batch_size, device_batch_size, world)
print0(f"batch: {device_batch_size} x {world} ranks x {grad_accum_steps} micro-steps = {total_batch_size:,} images")
sampler = choose_sampler(process, sampler, sample_steps)
if bpd_every >= 0 and (not process.num_timesteps or facts["kind"] != "images"):
    raise UserError(f"bpd_every={bpd_every} wants a Gaussian diffusion (objective eps, x0 or v) of pixels; -1 = never")
frechet = FrechetDistance(fid_metric, data, fid_images, codec, model_config, device) if fid_every >= 0 else None

# ---------------------------------------------------------------------------------------------------------------------
# The run folder: one trainer at a time, resumed from its newest intact checkpoint

model_tag = model_tag or f"{train_set.name}_{arch}_d{depth}"
run_dir = base_dir() / "runs" / model_tag
lock = lock_run(run_dir) if rank == 0 else None
checkpoint = resume_point(run_dir, resume)
loop = {"step": 0, "train_time_s": 0.0, "wandb_id": None}  # all state of the loop that is not in tensors
if checkpoint:
    meta = load_meta(checkpoint)
    changes = check_settings(config, meta["config"], model_tag)
    check_same_data(meta["data"], facts, model_tag)
    print0(f"resumed from {checkpoint}" + f", now with {', '.join(changes)}" * bool(changes))
    load_weights(raw_model, load_tensors(checkpoint / "model.pt"), checkpoint)
    optim.load_state_dict(load_tensors(checkpoint / "optim.pt"))
    ema.load_state_dict({str(rate): load_tensors(checkpoint / f"ema_{rate}.pt") for rate in ema.rates})
    state = load_tensors(checkpoint / "train.pt")
    timestep_sampler.load_state_dict(state["timesteps"])
    scaler.load_state_dict(state["scaler"])
    loop |= meta["loop"]
optim.check_replicas()  # all ranks start from the same weights, bit for bit
step = start_step = loop["step"]

described = dict(config=config, data=facts, model=asdict(model_config), num_params=num_params)
described |= dict(flops_per_image=flops_per_image, num_iterations=num_iterations)
log = RunLog(run, run_dir, device, described, defaults, step, loop["wandb_id"])
loop["wandb_id"] = log.wandb_id

# ---------------------------------------------------------------------------------------------------------------------
# The loop

model = compiled(raw_model, device) if compile else raw_model
guidance = cfg_scale if label_drop else 1.0  # a model that never went without labels has no null class to guide from
settings = SampleSettings(sample_steps, sampler, guidance)
loader = DataLoader(train_set, device_batch_size, total_batch_size, rank, world, seed, start_step=step, device=device)
images, labels = next(loader)  # (B, C, H, W) uint8, (B,) int64
stop = StopSignal()
stopping = False
since_log = [0, 0.0, 0.0]  # steps, seconds, and seconds of waiting for data since the last line


def due(every):
    """Is it time for what happens every so many steps (0 = only at the end, -1 = never)?"""
    return every >= 0 and (step == num_iterations or (every > 0 and step > 0 and step % every == 0))


while True:
    # Save before the slow evaluations, so that a crash there loses nothing
    if (due(save_every) or (stopping and save_every >= 0)) and (step > start_step or not checkpoint):
        optimizer_state = optim.state_dict()  # gathered over ranks: all take part
        if rank == 0:
            tensors = dict(model=raw_model.state_dict(), optim=optimizer_state)
            tensors |= {f"ema_{rate}": average for rate, average in ema.state_dict().items()}
            tensors["train"] = dict(timesteps=timestep_sampler.state_dict(), scaler=scaler.state_dict())
            described = dict(arch=arch, config=config, model_config=asdict(model_config), data=facts)
            meta = dict(step=step, **described, ema_rates=list(ema.rates), loop=loop | {"step": step})
            print0(f"saved {save_checkpoint(run_dir, step, tensors, meta, checkpoints_kept)}")

    # Validation loss, of the raw weights and of their average
    if due(eval_every) and not stopping:
        raw_model.eval()
        evaluation = process, val_set, codec, eval_images, device_batch_size, seed
        with autocast:
            val_loss, _ = validation_loss(model, *evaluation)
            with ema.applied():
                val_loss_ema, quarters = validation_loss(model, *evaluation)
        raw_model.train()
        by_t = " ".join("-" if q is None else f"{q:.4f}" for q in quarters)
        print0(f"step {step:05d} | val loss {val_loss:.4f} | of the average {val_loss_ema:.4f}, by quarter of t {by_t}")
        line = {f"val/loss_q{i}": q for i, q in enumerate(quarters) if q is not None}
        log.metrics({"step": step, "val/loss": val_loss, "val/loss_ema": val_loss_ema} | line)

    # Bits/dim, of the average
    if due(bpd_every) and not stopping:
        raw_model.eval()
        with ema.applied(), autocast:
            bpd = bits_per_dim(raw_model, process, val_set, codec, bpd_images, device_batch_size)["total_bpd"]
        raw_model.train()
        print0(f"step {step:05d} | {bpd:.4f} bits/dim")
        log.metrics({"step": step, "val/bpd": bpd})

    # Frechet distance of samples to the training images, of the average
    if due(fid_every) and not stopping:
        raw_model.eval()
        with ema.applied(), autocast:
            distance = frechet.measure(raw_model, process, codec, settings, device_batch_size)
        raw_model.train()
        print0(f"step {step:05d} | {fid_metric} {distance:.3f} of {fid_images:,} samples")
        log.metrics({"step": step, f"val/{fid_metric}": distance})

    # A grid of samples with fixed noise and classes; the other ranks go on and wait in the next step
    if due(sample_every) and not stopping and rank == 0:
        raw_model.eval()
        with ema.applied(), autocast:
            grid = sample_grid(raw_model, process, val_set, codec, settings, device_batch_size)
        raw_model.train()
        log.grid(grid, step)
    log.report(last=bool(stopping) or due(0))

    if step >= num_iterations or stopping:
        break

    # One step. All that is random in it is drawn here, for the whole batch of all ranks: so the model does not depend
    # on how the batch is cut up, and resuming needs no state of a random number generator.
    t0, wait_s = time.perf_counter(), 0.0
    draw = draw_step(seed, step, total_batch_size, codec, device)
    t, t_weight = timestep_sampler.sample(draw.u_t)  # the weight makes up for a t that is drawn more often than others
    micro_steps = []
    for micro_step in range(grad_accum_steps):
        first = (micro_step * world + rank) * device_batch_size
        rows = slice(first, first + device_batch_size)
        eps = draw.eps[rows] if codec.stochastic else None
        x0 = codec.to_x0(images, draw.u_flip[rows] < 0.5 if flip else None, eps)  # (B, C, H, W) in [-1, 1], or latents
        y = drop_labels(labels, draw.u_drop[rows], label_drop, num_classes)
        if dropout:
            torch.manual_seed(make_generator(seed, step, first).initial_seed())
        cond = conditioning(model_config, x0, y)
        with autocast:
            terms = process.losses(model, x0, t[rows], draw.noise[rows], **cond)
        terms["loss"] = terms["loss"] * t_weight[rows]  # (B,)
        scaler.scale(terms["loss"].mean() / grad_accum_steps).backward()
        micro_steps.append({name: x.detach() for name, x in terms.items()} | {"t": t[rows], "w": t_weight[rows]})
        images, labels = next(loader)  # the next micro-batch, while the device is busy with this one
        wait_s += loader.data_wait
    terms = {name: torch.cat([m[name] for m in micro_steps]) for name in micro_steps[0]}
    step_t, step_weight = terms.pop("t"), terms.pop("w")
    timestep_sampler.update(step_t, terms["loss"] / step_weight)
    grad_norm = float(optim.sync_grads()) * scaler.inv_scale  # the only exchange of gradients; waits for the device
    overflow = not math.isfinite(grad_norm)
    if overflow and not scaler.enabled:
        where = optim.not_finite()  # all weights are as they were, and so is the newest checkpoint
        raise FloatingPointError(f"step {step}: loss {terms['loss'].mean():g}, gradient not finite ({where})")
    if lr_schedule == "linear":
        lrm = 1 - step / num_iterations
    else:
        lrm = trapezoid(step, num_iterations, warmup_ratio, warmdown_ratio, final_lr_frac)
    for group in optim.param_groups:
        group["lr"] = group["initial_lr"] * lrm
    if not overflow:
        clip = min(1.0, grad_clip / (grad_norm + 1e-6)) if grad_clip > 0 else 1.0
        optim.step(grad_scale=clip * scaler.inv_scale)
        ema.update(step + 1)
    scaler.update(overflow)
    optim.zero_grad(set_to_none=True)
    stopping = stop.agreed(device)  # a signal to one rank stops all, after the same step
    step += 1
    dt = time.perf_counter() - t0
    loop["train_time_s"] += dt
    since_log = [a + b for a, b in zip(since_log, (1, dt, wait_s))]
    if step == start_step + 1:  # all is allocated and compiled: from here on the garbage collector only costs time
        gc.collect()
        gc.freeze()
        gc.disable()
    elif step % 5000 == 0:
        gc.collect()

    if step % log_every == 0 or step == num_iterations or stopping:
        sums = {name: sum_over_ranks(quartile_sums(step_t, x, process), device) for name, x in terms.items()}
        speed = flops_per_image, device, loop["train_time_s"], since_log
        line = metrics_line(step, total_batch_size, *speed, sums, grad_norm, lrm, scaler)
        log.metrics(line)
        print0(console_line(line, num_iterations))
        since_log = [0, 0.0, 0.0]

# ---------------------------------------------------------------------------------------------------------------------
# The end

loader.close()
log.finish()
end(step, stopping, loop["train_time_s"], device, run_dir)
