"""
Train an image diffusion model: settings, setup, loop, end. Read it top to bottom.

    python3 -m scripts.base_train runs/shapes_cpu.py             # a first model, in minutes on a laptop's CPU
    python3 -m scripts.base_train --data=cifar10 --depth=8       # a data set made by scripts.prepare_data
    torchrun --standalone --nproc_per_node=8 -m scripts.base_train --data=cifar10 --depth=12
    python3 -m scripts.base_train --init_from=DiT-XL-2-256x256.pt --data=mine_latents --lora_rank=8 --num_epochs=2

Rerunning the same command resumes where the run stopped. What it does, for the default, flow matching:

    repeat num_iterations times:
        x0 = images in [-1, 1] or latents, t = a number in [0, 1] for each, mostly near 0.5, noise = normal numbers
        x_t = (1 - t) * x0 + t * noise
        loss = mean((model(x_t, t, y) - (noise - x0))^2)
        step against the gradient of the loss; average the weights

The model learns the velocity dx_t/dt = noise - x0. Sampling integrates it from noise at t = 1 to an image at t = 0.
Why the velocity, t near 0.5, Muon? Together they did best (runs/LOG.md, 4 to 6). Why patches, and how t enters the
network: nanodiff/models/dit.py. How distances of samples are made: metrics/features.py. Tasks are in runs/GUIDE.md.

Words: a codec turns stored images or latents into x0, and samples into pixels. A process is the mathematics: noising,
loss, samplers. raw_model holds the weights, model is its compiled form. A rank is one worker of the run, a micro-batch
what it takes in one forward pass; a step has as many as it needs. The null class stands for "no label".
"""

import functools
import gc
import math
import sys
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

import torch

from configurator import configure
from nanodiff.common import UserError, draw_rows, get_dist, make_generator, print0
from nanodiff.conditions import conditioning, droppable
from nanodiff.data.codec import check_same_data, make_codec
from nanodiff.data.dataloader import DataLoader
from nanodiff.data.dataset import check_unchanged, open_dataset, start_verifying
from nanodiff.data.pixels import from_stored
from nanodiff.device import autocast_to, choose_dtype, device_name, host_copy, init_device, run_uncompiled
from nanodiff.diffusion.flow import Training
from nanodiff.diffusion.process import SAMPLERS, learns_guidance, make_process, parse_interval, why_unguided  # noqa: F401
from nanodiff.diffusion.timesteps import TIMESTEPS, make_timesteps  # noqa: F401 (setting)
from nanodiff.dist import Stopped, stop_signal
from nanodiff.files import load_tensors
from nanodiff.models.build import build_model, compiled, estimate_flops, load_weights, make_model_config, uncompiled
from nanodiff.safetensors import load_safetensors
from nanodiff.sampling.draw import SampleSettings, choose_guidance, choose_sampler, sample_grid
from nanodiff.training.batch import automatic_batch, cut_batch, memory_line
from nanodiff.training.checkpoint import Saver, lock_run, resume_point, run_folder, way_back
from nanodiff.training.ema import EMA
from nanodiff.training.log import Meter, RunLog, end
from nanodiff.training.optim import AdamW, LossScaler, Muon, param_groups
from nanodiff.training.settings import check_settings, refuse_useless
from nanodiff.training.shard import Optimizer
from nanodiff.training.validation import validation_loss

# ---------------------------------------------------------------------------------------------------------------------
# Settings, in a preset or as --key=value. `configure` reads the comments, "accepted: meaning". "# Only X": else refused

# What everybody touches
model_tag = ""  # folder of the run under $NANODIFF_BASE_DIR/runs; "" = data, arch and depth
data = "shapes"  # a set made by scripts.prepare_data or cache_latents; shapes is built in
depth = 4  # >= 1: the one dial of size. DiT: depth blocks of width 64*depth. UNet: 32*depth channels
num_iterations = -1  # >= -1: steps; -1 = derived; 0 = no training: only evaluate, sample and save
target_param_data_ratio = 12.0  # > 0 or -1: length of the run, in image tokens per parameter; 24 = twice the images
total_batch_size = 0  # >= 0: images per step, over all ranks; lr and muon_lr follow it; 0 = derived
device_batch_size = 0  # >= 0: images per forward pass of one rank; 0 = as many as fit on a CUDA GPU, elsewhere up to 64
lr = 0.0  # >= 0: AdamW's learning rate, for all but the blocks' matrices (muon_lr); 0 = by batch and width
flip = False  # mirror half of the images left-right
eval_every = 250  # >= -1: steps between validation losses, from 0 on; in every cadence 0 = only at the end, -1 = never
sample_every = 250  # >= -1: steps between grids of samples
cfg_scale = 2.5  # [0, 100]: classifier-free guidance of the samples; 1 = none
# The run
run = "dummy"  # name of the wandb run; "dummy" = no wandb
resume = "auto"  # auto|never|changed or >= 0: auto = from the newest checkpoint, if any, with the same settings;
#                  changed = despite new rates or length; a number = changed, from that step
seed = 42  # >= 0: seed of weights, order of images, noise
device_type = ""  # ""|cuda|cpu|mps: "" = the best available
dtype = "auto"  # auto|bfloat16|float16|float32: of matrix products and activations; weights and optimizer stay float32
compile = True  # by torch.compile, where that works
deterministic = False  # bitwise reproducible on CUDA, as always on a CPU; slower
# The horizon, instead of the ratio or num_iterations
num_epochs = -1.0  # > 0 or -1: passes over the training images
target_flops = -1.0  # > 0 or -1: FLOPs, forward and backward
# Model
arch = "dit"  # dit|dit_classic|unet: modern DiT, DiT as published, IDDPM's UNet
heads = 0  # >= 0: attention heads; 0 = width // 64 in a DiT, at least 4; 4 in a UNet
class_cond = True  # condition on labels, if the set has them
low_res_size = 0  # >= 0: super-resolution: side of the small image; 0 = off
checkpointing = False  # recompute activations in backward: less memory, a third more compute
# Fine-tuning
init_from = ""  # a run or file to start from: its weights and, unless given, its shape and process; "" = none
trainable = ""  # train only parameters whose names contain one of these: final,blocks.11; "" = all
lora_rank = 0  # >= 0: train adapters of this rank (LoRA), and new classes; 0 = off
# What is learned
objective = "flow"  # flow|flow_x0|flow_map|flow_map_x0|eps|x0|x_prev|v: flow = velocity, flow_x0 = image; flow_map,
#                     flow_map_x0 = jumps, tuned from a flow run; others = Gaussian diffusion
timesteps = "auto"  # auto|{TIMESTEPS}: distribution of t; auto = logit-normal for flow, else uniform
t_range = "0,1"  # train only where t, from 0 (image) to 1 (noise), is in this interval
label_drop = 0.1  # [0, 1): fraction of images that lose their conditions, for classifier-free guidance
# Optimisation
optimizer = "muon"  # muon|adamw: Muon for the blocks' matrices, AdamW for the rest; or AdamW for all
weight_decay = 0.0  # >= 0: decoupled, on tensors with 2 or more dimensions
beta2 = 0.95  # [0, 1): AdamW's decay of the mean squared gradient
grad_clip = 1.0  # > 0 or -1: scale larger gradients down to this norm (affects AdamW more than Muon); -1 = never
warmup_ratio = 0.02  # [0, 1]: fraction of the steps in which the learning rate rises linearly
warmdown_ratio = 0.5  # [0, 1]: fraction in which it falls linearly
ema_rates = "0.999"  # weight averages, comma-separated; the first is sampled; "" = none
ema_ramp = True  # average fewer steps early on, to forget initial weights: rate <= (1 + step) / (10 + step)
# Evaluation
eval_images = 1024  # >= 1: validation images, or all if there are fewer
fid_every = -1  # >= -1: steps between distances of samples, precision, recall
fid_images = 2000  # >= 10: samples for these
fid_metric = "fid"  # fid|fd_classifier|fd_simclr: features of Inception (96 MB), this set's classifier, SimCLR
sample_steps = 0  # >= 0: steps of the sampler; 0 = 9 of ralston, 4 of a flow map, 25 of ddim
sampler = "auto"  # auto|{SAMPLERS}: auto = the process's default
cfg_interval = "0.3,0.7"  # guide only where t is in this interval
save_every = 250  # >= -1: steps between checkpoints
checkpoints_kept = 2  # >= 1 or -1: newest that stay; -1 = all
log_every = 10  # >= 1: steps between log lines
# Only arch=dit
fp8 = False  # the blocks' linear layers in fp8 but for their weights' gradients; on Hopper GPUs (H100) and newer
# Only optimizer=muon
muon_lr = 0.0  # >= 0: Muon's learning rate; 0 = by batch and steps
# Only objective=flow|flow_x0|flow_map|flow_map_x0
time_input = "auto"  # auto|1000t|62.5t|t|1-t: how a network sees t; SiT 1-t, REPA t; auto = 62.5t in a dit, else 1000t
# Latents
autoencoder = ""  # path of a VAE to encode images on the fly, or of a latent set's VAE if it was moved
# Only arch=unet
dropout = 0.0  # [0, 1): dropout rate

# Settings of one backbone or process alone are in these modules; --help=all shows all
MODULES = ["models/dit", "models/unet", "models/lora", "diffusion/flow", "diffusion/gaussian"]

# Presets, then the command line override these globals. `config`: the same settings as a dict, refreshed below


def inherited(config):
    if not (config["init_from"] or config["lora_rank"]):
        return {}
    from nanodiff.formats import start  # lazy, like every indented import: a plain run opens only what it uses

    return start.inherited(config)


config = configure(globals(), fallback=inherited, modules=MODULES)
del inherited
if init_from or trainable or objective.startswith("flow_map"):
    from nanodiff.formats import start  # a lazy import

# ---------------------------------------------------------------------------------------------------------------------
# The run's folder: one trainer at a time

ddp_rank, _, world = get_dist()
model_tag = model_tag or f"{Path(data).absolute().name}_{arch}_d{depth}"
run_dir = run_folder(model_tag)
if ddp_rank == 0:
    lock = lock_run(run_dir)
    print0.file = open(run_dir / "log.txt", "a", encoding="utf-8")  # keeps what is printed

# ---------------------------------------------------------------------------------------------------------------------
# The machine

device = init_device(device_type, config=config)
compute_dtype = choose_dtype(dtype, device)
dtype = str(compute_dtype).removeprefix("torch.")
autocast = autocast_to(device, compute_dtype)
print0(f"device: {world} x {device_name(device)}, {compute_dtype}, torch {torch.__version__}")

# ---------------------------------------------------------------------------------------------------------------------
# Where it starts: the newest intact checkpoint, else init_from's model, else weights drawn from the seed

checkpoint, meta = resume_point(run_dir, resume)
# `source`: init_from's model. `source_data`: its data; new data take its scale and, with adapters, its class numbers
source = source_data = None
if init_from:
    source, source_data = start.open_source(config, meta, device)

# ---------------------------------------------------------------------------------------------------------------------
# Data

train_set = open_dataset(data, "train", source_data)
val_set = open_dataset(data, "val", source_data) if "val" in train_set.meta["splits"] else None
codec = make_codec(train_set, device, autoencoder, flip, source_data)  # stored uint8 or latents <-> x0 <-> pixels
data_info = codec.data
class_names = data_info.class_names if class_cond else []
sizes = ", ".join("x".join(map(str, shape)) for shape in codec.shapes)
print0(f"data: {data}: {len(train_set):,} + {len(val_set or ()):,} images of {sizes}, {len(class_names)} classes")
if sample_every >= 0:
    codec.decoder()

# ---------------------------------------------------------------------------------------------------------------------
# What is learned, and the model that learns it

meta["config"] = past_settings = {"time_input": "1000t"} | meta["config"] if checkpoint else {}  # old runs lack it
if time_input == "auto":
    default = "62.5t" if arch == "dit" and not init_from else "1000t"
    config["time_input"] = time_input = past_settings.get("time_input", default)
if not config["timestep_shift"]:  # the same noise hides less of a larger image
    config["timestep_shift"] = timestep_shift = past_settings.get("timestep_shift", max(1, data_info.resolution / 32))
process = make_process(config, data_info)  # noising, loss, samplers
model_config = make_model_config(config, data_info, process)
fixed = asdict(source.model.config) if lora_rank else meta.get("model_config")
if fixed:  # published and older models lack the channel that marks a null second image
    channels = fixed.get("given_channels", 0)
    if data_info.given_channels not in (0, channels):
        raise UserError(f"data={data!r} has second images, which the base or checkpoint does not take")
    first_block = {"flow_map": fixed["flow_map"]} if process.is_map else {}
    model_config = replace(model_config, given_channels=channels, **first_block)
raw_model = build_model(model_config, device, seed)
new = start.start_from(raw_model, source, config, class_names) if source else []
num_params = sum(p.numel() for p in raw_model.parameters())
lora = start.with_adapters(raw_model, source, config, class_names, train_set) if lora_rank else None
if trainable:
    start.train_only(raw_model, trainable, new)
num_trained = sum(p.numel() for p in raw_model.parameters() if p.requires_grad)
# A third each: forward, gradients of activations, gradients of the weights that learn
flops_per_image = estimate_flops(raw_model) * (2 * num_params + num_trained) // (3 * num_params)
print0(f"model: {arch} d{depth}: {num_params:,} parameters, {num_trained:,} of them trained")
print0(f"{flops_per_image:.3e} FLOPs per image (forward + backward)")

# ---------------------------------------------------------------------------------------------------------------------
# The size of the run. What is not given is derived:
#     images = 12 * parameters / tokens           12: target_param_data_ratio; tokens of an image
#     batch  = 64 * sqrt(images * tokens / 20e6)  rounded to a power of two, at least 16; 64 suits 20e6 tokens
#     steps  = images / batch
#     rates  = Muon: 0.02 (batch / 64)^(1/4) min(1, 2000 / steps)^(1/2); AdamW: 0.003 sqrt(batch / 64) 256 / width (DiT)
# DiT-B (depth 12) has 129 M parameters and 256 tokens: 6.1 M images, batch 512, 11,852 steps, lr 0.0028, muon_lr 0.014.
# Why? A model of twice the size gets twice the tokens, as in nanochat. Late in a long run the gradient's noise limits
# the loss, so batches grow and Muon's rate falls (measured to depth 4, 8,000 steps; LOG.md, 7 and 27). AdamW's root was
# too much for Muon at batch 512. 256 / width: a wider layer adds up more of AdamW's moves, each about lr

# 1) The horizon: how long the run is
tokens = model_config.num_tokens
total_images = 0  # 0 = not known yet
horizons = "num_iterations num_epochs target_flops target_param_data_ratio".split()
horizons = [name for name in horizons if config.overrides.get(name, -1) >= 0]
if len(horizons) > 1:
    raise UserError(f"{' and '.join(horizons)} are given, perhaps by a preset; accepted: one, the others -1")
if num_iterations >= 0:
    how_long = "as given"
elif num_epochs > 0:
    total_images, how_long = num_epochs * len(train_set), f"{num_epochs:g} epochs"
elif target_flops > 0:
    total_images, how_long = target_flops / flops_per_image, f"{target_flops:.3g} FLOPs"
elif init_from and not checkpoint and "target_param_data_ratio" not in config.overrides:
    raise UserError("init_from without a horizon; accepted: --num_epochs=2, --num_iterations=500 or the like")
elif target_param_data_ratio > 0:
    total_images = target_param_data_ratio * num_trained / tokens
    how_long = f"{target_param_data_ratio:g} tokens per parameter that learns"
else:
    raise UserError("no horizon: give num_iterations, num_epochs, target_flops or target_param_data_ratio")

# 2) The batch. A resumed run keeps its own
total_batch_size = total_batch_size or past_settings.get("total_batch_size", 0)
if not total_batch_size:
    if total_images:
        relative = math.sqrt(total_images * tokens / 20e6)
    else:  # images = steps * batch: solved for batch / 64
        relative = num_iterations * 64 * tokens / 20e6
    total_batch_size = 2 ** round(math.log2(max(64 * relative, 16)))
    total_batch_size = world * max(1, round(total_batch_size / world))  # 3, 5, 6, 7 ranks take equally many

# 3) The steps
if num_iterations < 0:
    num_iterations = max(1, round(total_images / total_batch_size))
epochs = num_iterations * total_batch_size / len(train_set)
print0(f"run: {num_iterations:,} steps ({how_long}) x {total_batch_size:,} images: {epochs:.1f} epochs")

# 4) The rates. A resumed run keeps its own
rate_source = "as before" if checkpoint else "by batch, width and steps"
root = math.sqrt(total_batch_size / 64)
by_width = 1 if arch == "unet" else 256 / model_config.width
part = 1
if init_from and not lora_rank:  # a short run cannot repair what high rates break
    rate_source, part = f"{rate_source}; tuning takes less below 500 steps", min(1, num_iterations / 500)
lr = lr or past_settings.get("lr") or part * 3e-3 * root * by_width
muon_lr = muon_lr or past_settings.get("muon_lr") or part * 0.02 * math.sqrt(root * 2000 / max(num_iterations, 2000))
print0(f"rates: lr {lr:.3g}, muon_lr {muon_lr:.3g} (if not given, {rate_source})")

# 5) How often
if val_set is None and eval_every >= 0:
    print0("no validation split: the validation loss is skipped")
    eval_every = -1
print0(f"every {eval_every:,}, {sample_every:,}, {save_every:,} steps: validation, grid, checkpoint (0: at the end)")

# ---------------------------------------------------------------------------------------------------------------------
# Refuse useless settings and, on resume, changed ones: training/settings.py's FREE may change, RATES if asked

config |= {name: globals()[name] for name in config}  # with what was derived
refuse_useless(config, data_info, droppable(model_config), checkpoint)
step = start_step = meta["step"] if checkpoint else 0
if checkpoint:
    check_same_data(meta["data"], data_info, model_tag)
    check_settings(checkpoint, meta, config)
num_iterations = num_iterations or step  # 0: train nothing

# ---------------------------------------------------------------------------------------------------------------------
# Optimizer, averages, micro-batches

t_distribution = make_timesteps(timesteps, process, *parse_interval(t_range, "t_range"))
if process.is_map:
    start.teach(process, source, model_config, class_names)
    print0(f"teacher: {source.title}; the map learns to draw its samples, whatever images it sees")
    teacher = start.identity(source)
    process.teacher = replace(source, model=compiled(source.model, device, num_iterations, compile))
# Each rank keeps the optimizer's state of its share of the parameters, and updates only it (ZeRO stage 1)
several_gpus = world > 1 and device.type == "cuda"
grad_dtype = compute_dtype if several_gpus and compute_dtype == torch.bfloat16 else torch.float32  # as sent
groups = param_groups(raw_model, optimizer, lr, muon_lr, weight_decay)
rules = {"muon": Muon(device, compile, compute_dtype), "adamw": AdamW(beta2)}
optim = Optimizer(raw_model, groups, rules, grad_dtype)
ema = EMA(raw_model, optim, ema_rates, ema_ramp)
scaler = LossScaler(enabled=compute_dtype == torch.float16)  # the identity in bf16 and fp32
if fp8:
    from nanodiff.models.fp8 import calibrate, use_fp8  # a lazy import

    use_fp8(raw_model, device, compute_dtype)
if device_batch_size == 0:
    largest = max(codec.shapes, key=math.prod)
    device_batch_size = automatic_batch(raw_model, process, largest, autocast, total_batch_size // world)
device_batch_size, grad_accum_steps = cut_batch(total_batch_size, device_batch_size, world)
config["device_batch_size"] = device_batch_size
print0(f"batch: {total_batch_size:,} images ({device_batch_size} x {world} devices x {grad_accum_steps} passes)")
print0(memory_line(raw_model, optim, ema, device_batch_size))  # d12: 2 GiB + 88 MiB an image

# ---------------------------------------------------------------------------------------------------------------------
# Samples. A run with guided_from, which raises the loss, is always sampled unguided

sample_steps = sample_steps or process.default_steps
sampler = choose_sampler(process, sampler, sample_steps)
fault = why_unguided(config, droppable(model_config))
overrides = {} if learns_guidance(config) else config.overrides  # cfg_scale may shape training alone
sample_settings = SampleSettings(sample_steps, sampler, *choose_guidance(cfg_scale, cfg_interval, fault, overrides))
if fid_every >= 0:
    from nanodiff.metrics.features import sample_quality  # a lazy import: judges of samples

    measure_samples = sample_quality(fid_metric, val_set or train_set, fid_images, codec, model_config)

# ---------------------------------------------------------------------------------------------------------------------
# Resume

loop_state = {"train_time_s": 0.0, "wandb_id": None, "log_lines": 0, "running_loss": 0.0}
passes = {"ralston": 6, "heun": 4}.get(sampler, 2) * sample_steps  # network calls per guided sample: for the time left
costs = [(eval_every, 2 * eval_images), (sample_every, 64 * passes), (fid_every, fid_images * passes)]
meter = Meter(process, device, compute_dtype, costs, loop_state)
if checkpoint:
    load_weights(raw_model, load_safetensors(checkpoint / "model.safetensors")[0], checkpoint)
    optim.load_state_dict(load_tensors(checkpoint / "optim.pt", mmap=True))
    ema.load_state_dict({path.stem: load_safetensors(path)[0] for path in checkpoint.glob("ema_*.safetensors")})
    train_state = load_tensors(checkpoint / "train.pt")
    t_distribution.load_state_dict(train_state["timesteps"])
    scaler.lg_loss_scale = train_state["scaler"]["lg_loss_scale"]
    loop_state |= meta["loop"]
    meter.load_state_dict(train_state.get("meter", []))

run_info = dict(config=config, data=data_info, model=asdict(model_config), num_params=num_params)
run_info |= dict(num_iterations=num_iterations, flops_per_image=flops_per_image)
log = RunLog(run, run_dir, device, run_info, step, loop_state)
report_due = 0.0  # when report.html is next written, by time.monotonic
evaluated_step = -1  # a step that is repeated is evaluated once
overflow = False  # in the last step

# ---------------------------------------------------------------------------------------------------------------------
# The loop: save -> evaluate -> sample -> stop? -> one step -> log


def due(every, first=1):
    """Is it time for something that happens every so many steps from `first` (0 = only at the end, -1 = never)?"""
    return every >= 0 and (step == num_iterations or (every > 0 and step >= first and step % every == 0))


def lr_multiplier(s):
    """Linear warmup, constant, linear warmdown towards 0: a factor on every learning rate at step s."""
    warmup = warmup_ratio * num_iterations
    warmdown = max(warmdown_ratio * num_iterations, 1)
    return min((s + 1) / (warmup + 1), 1.0, (num_iterations - s) / warmdown)


def save():
    """Write this step's checkpoint in a thread, while training continues. A collective."""
    check_unchanged(train_set, val_set)
    saver.wait()  # for the last save, to free its copies
    optim_state, averages, sums = optim.state_dict(), ema.state_dict(), meter.state_dict()  # gathered over ranks
    loss_history = host_copy(t_distribution.state_dict())
    if ddp_rank == 0:
        tensors = {
            "model": host_copy(raw_model.state_dict()),
            "optim": optim_state,  # whatever the number of ranks
            "train": dict(timesteps=loss_history, scaler=dict(lg_loss_scale=scaler.lg_loss_scale), meter=sums),
        } | averages  # ema_0.999 and so on
        new_meta = {
            "step": step,
            "arch": arch,
            "config": config,
            "command": sys.argv[1:],  # rerunning --resume=STEP continues, instead of going back again
            "model_config": asdict(model_config),
            "data": data_info,
            "ema_rates": ema.rates,
            "loop": loop_state.copy(),
        }
        if process.is_map:
            new_meta |= {"teacher": teacher["base"], "teacher_sha256": teacher["sha256"]}
        if lora:
            new_meta["lora"] = lora
            start.save_adapters(run_dir, new_meta, tensors)
        # While fp16 skips steps, the weights may have exploded: delete nothing
        saver.start(run_dir, step, tensors, new_meta, -1 if overflow else checkpoints_kept)
    saver.step = step  # on all ranks


model = compiled(raw_model, device, num_iterations, compile)
draw_device = device if device.type == "cuda" else torch.device("cpu")  # where random numbers are drawn
# At step s, micro-step m, rank r reads from s*total_batch_size + (m*world + r)*device_batch_size on, in a seeded order
loader = DataLoader(train_set, device_batch_size, total_batch_size, ddp_rank, world, seed, step, device)
images, stored_cond = next(loader)  # (B, C, H, W), {"y": labels (B,), other conditions}
saver = Saver(start_step if checkpoint else -1)
faults = start_verifying(train_set)  # hashes the set in a thread
# Randomness. A few numbers per image (flip, t, dropping) come from (seed, s): each rank draws the whole batch's. Large
# tensors, of which a rank draws only its rows, come from (seed, s, stream, block of rows). So ranks and micro-batches
# change the model only by rounding (and dropout's masks); the same command resumes identically (CUDA: deterministic)
NOISE, VAE_NOISE, DROPOUT, JUMPS = 1, 2, 3, 4  # streams

while True:
    if faults:  # a damaged set ends the run before it is saved
        raise faults[0]
    leaving = step >= num_iterations or stop_signal.is_stopping  # save first: a crash in an evaluation loses nothing
    at_end = leaving and save_every >= 0
    if (at_end or due(save_every)) and step != saver.step:
        save()

    # Evaluate, not compiled: for a few batches, compiling costs more than it saves
    validates = due(eval_every, first=0)  # step 0: what an untrained model gets
    if step > evaluated_step and not stop_signal.is_stopping and (validates or due(fid_every) or due(sample_every)):
        evaluated_step = step
        figures = {}
        val_args = (process, val_set, codec, eval_images, device_batch_size, seed)
        with suppress(Stopped), uncompiled(), autocast:
            # The same images, t and noise each time; no label dropped, no flip: compare val with val
            if validates:
                raw_model.eval()
                figures["val/loss"], _ = validation_loss(raw_model, *val_args)
                raw_model.train()
            with ema.applied(raw_model):  # and eval mode
                if validates:
                    figures["val/loss_ema"], by_t = validation_loss(raw_model, *val_args)  # averages lag
                    figures |= {f"val/loss_q{i}": q for i, q in enumerate(by_t) if not math.isnan(q)}
                if due(fid_every):
                    qualities = measure_samples(raw_model, process, sample_settings, device_batch_size)
                    figures |= {f"val/{name}": value for name, value in qualities.items()}
                if due(sample_every):  # the vibe check: the same noise and classes each time
                    image_set = val_set or train_set
                    grid = sample_grid(raw_model, process, image_set, codec, sample_settings, device_batch_size)
                    log.grid(grid, step)
        if stop_signal.is_stopping:  # a signal cut this short; resuming repeats it
            continue
        if figures:
            print0(log.evaluation(step, figures))

    if ddp_rank == 0 and (leaving or validates or due(sample_every)):
        from nanodiff.web.report import refresh_report  # a lazy import

        report_due = refresh_report(run_dir, 0.0 if leaving else report_due)
    if leaving:
        break

    # -----------------------------------------------------------------------------------------------------------------
    # One step: draw
    saver.check()  # an error in its thread ends the run
    meter.start_step(grad_accum_steps)
    g = make_generator(seed, step, device=draw_device)
    u_flip, u_t, u_drop = torch.rand(3, total_batch_size, generator=g, device=draw_device).to(device)  # (N,) in [0, 1)
    t, t_weight = t_distribution.sample(u_t)  # (N,), (N,): by inverse CDF; most laws of t weigh all 1

    # Micro-batches: what fits into memory; gradients add up in p.grad, in fp32
    for micro_step in range(grad_accum_steps):
        first = (micro_step * world + ddp_rank) * device_batch_size
        rows = slice(first, first + device_batch_size)
        flips = u_flip[rows] < 0.5 if flip else None
        vae_noise = functools.partial(draw_rows, (seed, step, VAE_NOISE), first, draw_device)
        x0 = codec.to_x0(images, flips, vae_noise)  # (B, C, H, W) fp32, images in [-1, 1]
        noise = draw_rows((seed, step, NOISE), first, draw_device, x0)
        # For guidance some images lose their conditions: a label becomes the null class, the rest NaN
        cond = from_stored(stored_cond, data_info, flips)
        cond = conditioning(model_config, cond, x0, is_dropped=u_drop[rows] < label_drop)
        if dropout:
            torch.manual_seed(make_generator(seed, step, DROPOUT, first).initial_seed())
        # Flow matching (flow.py; or noise prediction, gaussian.py; jumps, flow_map.py), t from 0 (image) to 1 (noise):
        #     x_t = (1 - t) * x0 + t * noise
        #     loss = mean((model(x_t, t, y) - (noise - x0))^2)    the network sees 62.5 t: time_input
        draw_jumps = functools.partial(draw_rows, (seed, step, JUMPS), first, draw_device, random=torch.rand)
        training = Training(step / num_iterations, draw_jumps)
        if fp8 and micro_step == 0 and (step == saver.step or due(eval_every) or step & (step - 1) == 0):
            calibrate(raw_model, process, autocast, (x0, t[rows], noise, cond, training), total_batch_size // world)
        with autocast:
            terms = process.losses(model, x0, t[rows], noise, cond, training)  # asks model(x_t, t): "loss", ... (B,)
        loss = (terms["loss"] * t_weight[rows]).mean() / grad_accum_steps
        optim.last_micro_step = micro_step == grad_accum_steps - 1  # its backward sends gradients while it computes
        scaler.scale(loss).backward()
        images, stored_cond = next(loader)  # while the GPU is busy
        meter.add(t[rows], t_weight[rows], terms, loader.data_wait)
        if stop_signal.number:
            break

    # Exchange: each rank gets the average gradient of its share of the parameters; a stop signal travels with the norm
    norm = optim.sync_grads(stop_signal.number) * scaler.inv_scale  # global L2 norm, on the device

    # Update: each rank its share; all-gathers end before the blocks that read them
    lrm = lr_multiplier(step)
    for group in optim.param_groups:
        group["lr"] = group["initial_lr"] * lrm
    clip = (grad_clip / (norm + 1e-6)).clamp(max=1.0) if grad_clip > 0 else 1.0
    optim.step(grad_scale=clip * scaler.inv_scale)  # unless the norm is not finite, or a rank stops
    grad_norm, stop_signal.is_stopping = optim.read_norm()  # the host waits while the GPU updates
    if stop_signal.is_stopping:  # drop this step
        continue
    grad_norm *= scaler.inv_scale
    overflow = not math.isfinite(grad_norm)
    if overflow and not scaler.can_skip:
        fault = f"step {step}: loss {loss.item() * grad_accum_steps:g}, gradient not finite ({optim.not_finite()})"
        if not (compile and run_uncompiled()):
            raise FloatingPointError(f"{fault}; {way_back(run_dir)}")
        print0(f"{fault}: compiled code may be wrong; repeated uncompiled, as is what follows")
        optim.zero_grad()
        loader.seek(step)
        images, stored_cond = next(loader)
        continue
    losses = meter.losses()  # of this rank's images
    if not overflow:  # else fp16 skips the step and halves the loss scale
        t_distribution.record(*losses)
        ema.update(step + 1)  # average <- rate * average + (1 - rate) * weights
    scaler.update(overflow)
    optim.zero_grad()

    # Bookkeeping
    step += 1
    log_now = step % log_every == 0 or step == num_iterations
    meter.end_step(x0.shape, log_now)  # waits for the device on log lines
    if step == start_step + 1:
        stop_signal.listen()  # until now a signal ended the run at once
        gc.collect()  # all is allocated: the garbage collector need not look at it again
        gc.freeze()
    if log_now:
        line = meter.line(step, total_batch_size, flops_per_image)
        line |= {"train/grad_norm": grad_norm, "train/lrm": lrm}
        if scaler.enabled:
            line["train/lg_loss_scale"] = scaler.lg_loss_scale
        log.metrics(line)  # to metrics.jsonl and wandb
        print0(meter.console(line, num_iterations))

# ---------------------------------------------------------------------------------------------------------------------
# The end

loader.close()
saver.wait()
end(log, step, loop_state["train_time_s"], device, has_checkpoint=saver.step == step)
