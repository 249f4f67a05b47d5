"""
Train an image diffusion model: settings, setup, loop, end. Read it top to bottom.

    python -m scripts.base_train runs/shapes_cpu.py             # a first model, in minutes on a laptop's CPU
    python -m scripts.base_train --data=cifar10 --depth=8       # a data set made by scripts.prepare_data
    torchrun --standalone --nproc_per_node=8 -m scripts.base_train --data=cifar10 --depth=12

Rerunning the same command resumes where the run stopped.
"""

import functools
import gc
import math
import time
from dataclasses import asdict

import torch

from configurator import configure
from nanodiff.common import StopSignal, UserError, draw_rows, get_dist, make_generator, print0
from nanodiff.data.codec import check_same_data, make_codec
from nanodiff.data.dataloader import DataLoader
from nanodiff.data.dataset import open_dataset
from nanodiff.device import autocast_to, choose_dtype, device_name, host_copy, init_device, peak_flops, synchronize
from nanodiff.diffusion.guidance import choose_guidance, conditioning
from nanodiff.diffusion.process import SAMPLERS, choose_sampler, make_process  # noqa: F401 (the settings name SAMPLERS)
from nanodiff.diffusion.timesteps import TIMESTEPS, make_timesteps  # noqa: F401 (the settings name TIMESTEPS)
from nanodiff.files import load_tensors
from nanodiff.formats.load import load_run, load_weights
from nanodiff.formats.start import start_from, train_only
from nanodiff.metrics.features import SampleQuality
from nanodiff.metrics.losses import bits_per_dim, validation_loss
from nanodiff.models.build import build_model, compiled, make_model_config, uncompiled
from nanodiff.sampling.draw import SampleSettings, sample_grid
from nanodiff.training.checkpoint import Saver, lock_run
from nanodiff.training.ema import EMA
from nanodiff.training.log import LossTerms, RunLog, check_wandb, end
from nanodiff.training.optim import LossScaler, make_optimizer
from nanodiff.training.resume import cut_batch, largest_batch, resume_point, run_folder
from nanodiff.web.report import LiveReport

# ---------------------------------------------------------------------------------------------------------------------
# Settings: each can be given in a preset file or as --key=value.
# After the "#": the accepted values, if limited; a colon; the meaning. Settings that would do nothing are refused.

# The run
run = "dummy"  # name of the wandb run; "dummy" = no wandb
model_tag = ""  # folder of this run under $NANODIFF_BASE_DIR/runs; "" = made from data, arch and depth
resume = "auto"  # auto|never|changed or >= 0: auto = from the newest checkpoint, if any, with its settings only;
#                  changed = likewise, but rates and horizon may differ; a number = from that step
seed = 42  # >= 0: seed of the weights, the order of the images and all noise
device_type = ""  # ""|cuda|cpu|mps: "" = the best available
dtype = "auto"  # auto|bfloat16|float16|float32: dtype of the matrix products; weights and their averages stay fp32
compile = True  # torch.compile
deterministic = False  # bitwise reproducible on CUDA, but slower; a CPU always is
# Data
data = "shapes"  # name or folder of a set made by scripts.prepare_data or cache_latents; shapes is built in
flip = False  # mirror half of the images left-right
class_cond = True  # condition on labels, if the data set has them
# Model
arch = "dit"  # dit|dit_classic|unet: modern DiT, DiT as published, IDDPM's UNet
depth = 4  # >= 1: the one dial of size. DiT: depth blocks of width 64*depth. UNet: 32*depth channels
heads = 0  # >= 0: attention heads; 0 = width // 64 in a DiT, at least 4; 4 in a UNet
low_res_size = 0  # >= 0: side in pixels of the small image to enlarge (super-resolution); 0 = off
init_from = ""  # run, exported or published file whose weights to start from; "" = drawn from the seed
trainable = ""  # train only parameters whose names contain one of these, such as final,blocks.11; "" = all
checkpointing = False  # recompute activations in the backward pass: less memory, a third more compute
# What is learned
objective = "flow"  # flow|flow_x0|eps|x0|x_prev|v: the network's output. flow, flow_x0 = velocity, x0 of flow
#                     matching; the rest = a Gaussian diffusion
timesteps = "auto"  # auto|{TIMESTEPS}: distribution of t; auto = logit-normal for flow, else uniform
label_drop = 0.1  # [0, 1): fraction of labels replaced by the null class, for classifier-free guidance
# Horizon: the first that is set (not -1) counts
num_iterations = -1  # >= -1: optimisation steps; 0 = evaluate, sample and save what there is
num_epochs = -1.0  # > 0 or -1: passes over the training images
target_flops = -1.0  # > 0 or -1: FLOPs of the whole training
target_param_data_ratio = 12.0  # > 0 or -1: image tokens to train on, per parameter
# Optimisation
total_batch_size = 0  # >= 0: images per step, over all ranks; 0 = from the horizon, scaling lr and muon_lr
device_batch_size = 64  # >= 0: images per forward pass of one rank; 0 = as many as fit into its memory
optimizer = "muon"  # muon|adamw: Muon for the blocks' matrices except adaLN's, AdamW for the rest; or AdamW for all
lr = 3e-3  # > 0: AdamW's learning rate; if total_batch_size is 0, scaled from 64 images per step and DiT width 256
weight_decay = 0.0  # >= 0: decoupled, on tensors with 2 or more dimensions
beta2 = 0.95  # [0, 1): AdamW's decay rate of the mean squared gradient
grad_clip = 1.0  # > 0 or -1: largest global norm of the gradient; -1 = never clip
warmup_ratio = 0.02  # [0, 1]: fraction of the steps in which the learning rate rises linearly
warmdown_ratio = 0.5  # [0, 1]: fraction in which it falls linearly; IDDPM's anneal is warmup 0, warmdown 1
final_lr_frac = 0.0  # [0, 1]: learning rate at the end, relative to the full one
ema_rates = "0.999"  # weight averages to keep, comma-separated; the first is evaluated and sampled; "" = none
ema_ramp = True  # shorter averages early on, so that early samples forget the initial weights
# Evaluation: every so many steps; 0 = only at the end, -1 = never
eval_every = 250  # >= -1: validation loss
eval_images = 1024  # >= 1: validation images per evaluation
fid_every = -1  # >= -1: Frechet and kernel distance, precision and recall of samples, drawn like those of the grid
fid_images = 2000  # >= 10: samples for them
fid_metric = "fid"  # fid|fd_classifier: in Inception's features (96 MB download), or those of a classifier of this set
sample_every = 250  # >= -1: grid of samples
sample_steps = 25  # >= 1: steps of the sampler
sampler = "auto"  # auto|{SAMPLERS}: auto = heun for flow matching, ddim for Gaussian diffusion
cfg_scale = 2.0  # >= 0: classifier-free guidance of the samples; 1 = none
cfg_interval = "0,1"  # guide only where t, from 0 (image) to 1 (noise), is in this interval
save_every = 1000  # >= -1: checkpoint
checkpoints_kept = 2  # >= 1 or -1: newest checkpoints that stay; -1 = all
log_every = 10  # >= 1: steps between log lines
# Only arch=dit|dit_classic
patch_size = 0  # >= 0: side of a token in pixels or latents; 0 = size // 16, at least 2: 256 tokens for 32, 64, 128 px
width = 0  # >= 0: overrides 64*depth, such as DiT-XL's 1152 at depth 28; 0 = 64*depth
# Only arch=unet
num_res_blocks = 3  # >= 1: residual blocks per resolution
attention_resolutions = "16,8"  # feature map sizes with attention, in pixels, comma-separated
use_scale_shift_norm = True  # t scales and shifts the norms, rather than being added
dropout = 0.0  # [0, 1): dropout rate
# Only objective=flow|flow_x0
timestep_shift = 1.0  # > 0: s moves t to s t / (1 + (s - 1) t), towards the noise, in training and sampling
timestep_std = 1.0  # > 0: standard deviation of logit(t), if t is logit-normal; less than 1 favours the middle more
# Only objective=eps|x0|x_prev|v
noise_schedule = "cosine"  # linear|cosine: betas of the Gaussian diffusion
num_timesteps = 1000  # >= 1: T of the Gaussian diffusion
variance = "fixed_small"  # fixed_small|fixed_large|learned|learned_range: variance of p(x_{t-1}|x_t); small = the
#                            posterior's, large = beta; learned_range is IDDPM's
loss = "mse"  # mse|rescaled_mse|kl|rescaled_kl: mse with a learned variance is IDDPM's hybrid loss
rescale_timesteps = True  # the network sees t in [0, 1000) whatever num_timesteps is
bpd_every = -1  # >= -1: bits/dim over eval_images validation images, T evaluations each
# Only optimizer=muon
muon_lr = 0.02  # > 0: Muon's learning rate; if total_batch_size is 0, scaled from 64 images per step
# Several ranks
grad_dtype = "float32"  # float32|bfloat16: dtype in which ranks reduce gradients
# Latents
autoencoder = ""  # path of a VAE, to encode images on the fly; with a latent set, its VAE's new path if it was moved
latent_norm = "channels"  # channels|scale: normalise latents by the set's mean and std, or by the VAE's published scale

config = configure(globals())

# ---------------------------------------------------------------------------------------------------------------------
# Setup: device, data, model, sizes

ddp_rank, _, world = get_dist()
check_wandb(run)
device = init_device(device_type, deterministic=deterministic)
compute_dtype = choose_dtype(dtype, device)
autocast = autocast_to(device, compute_dtype)
peak, peak_source = peak_flops(device, compute_dtype)  # of one device, in FLOP/s
print0(f"device: {world} x {device_name(device)}, {compute_dtype}, torch {torch.__version__}")
print0(f"peak: {peak:.3g} FLOP/s ({peak_source}); mfu is relative to it")

train_set = open_dataset(data, "train")
val_set = open_dataset(data, "val") if "val" in train_set.meta["splits"] else None
codec = make_codec(train_set, device, autoencoder, latent_norm, flip)  # stored uint8 or latents <-> x0 <-> pixels
num_classes = codec.description["num_classes"] if class_cond else 0  # the null class is num_classes
shapes = ", ".join("x".join(map(str, shape)) for shape in codec.shapes)
print0(f"data: {data}: {len(train_set):,} + {len(val_set or ()):,} images of {shapes}, {num_classes or 'no'} classes")
if val_set is None:
    print0("no validation split: validation loss and bits/dim are skipped")
    eval_every = bpd_every = -1
if codec.undecodable:
    print0(f"grids will show latents, not pixels: {codec.undecodable}")

process = make_process(config, codec.description)  # flow matching or Gaussian diffusion: noising, loss, samplers
model_config = make_model_config(config, codec.description, process.out_channels(codec.shape[0]))
raw_model = build_model(model_config, device, seed)
num_params = sum(p.numel() for p in raw_model.parameters())
flops_per_image = raw_model.estimate_flops()
print0(f"model: {arch} d{depth}: {num_params:,} parameters, {flops_per_image:.3e} FLOPs per image (forward + backward)")

# The horizon: how many images. Image tokens per parameter play the part of nanochat's text tokens per parameter: a
# model of twice the size trains on twice the tokens, so each depth gets its own compute-balanced run.
tokens = model_config.num_tokens  # per image
total_images = 0
if num_iterations >= 0:
    horizon = f"{num_iterations:,} steps"
elif num_epochs > 0:
    total_images = num_epochs * len(train_set)
    horizon = f"{num_epochs:g} epochs x {len(train_set):,} images"
elif target_flops > 0:
    total_images = target_flops / flops_per_image
    horizon = f"{target_flops:.3e} / {flops_per_image:.3e} FLOPs"
elif target_param_data_ratio > 0:
    total_images = target_param_data_ratio * num_params / tokens
    horizon = f"{target_param_data_ratio:g} x {num_params:,} parameters / {tokens} tokens"
else:
    raise UserError("no horizon: give num_iterations, num_epochs, target_flops or target_param_data_ratio")

# The batch grows with the square root of the horizon in tokens (the end of a longer run needs less noisy gradients),
# and the learning rates with the square root of the batch, never with the number of ranks. 20 million tokens get 64
# images; this gives 64 at depth 3 on 64 tokens, and on 256 tokens 512 for DiT-B, 1,024 for DiT-XL. AdamW's rate falls
# with the width: each weight moves by about the rate, and a wider layer sums more of them. Muon's scales itself.
if total_batch_size == 0:
    root = math.sqrt(total_images * tokens / 20e6) if total_images else num_iterations * 64 * tokens / 20e6
    total_batch_size = 2 ** max(4, round(math.log2(max(64 * root, 1))))
    scale = math.sqrt(total_batch_size / 64)
    lr_scale = scale if arch == "unet" else scale * 256 / model_config.width
    lr *= lr_scale
    muon_lr *= scale
    scaled = f"lr x {lr_scale:.2f}, muon_lr x {scale:.2f}"
    print0(f"batch: 64 x {root:.2f}, the root of {horizon}: {total_batch_size:,} images; {scaled}")
    config |= {"total_batch_size": total_batch_size, "lr": lr, "muon_lr": muon_lr}  # recorded as used
if num_iterations < 0:
    num_iterations = round(total_images / total_batch_size)
    print0(f"steps: {horizon} / {total_batch_size:,} = {num_iterations:,}")
total_images = num_iterations * total_batch_size
epochs = total_images / len(train_set)
print0(f"images: {num_iterations:,} x {total_batch_size:,} = {total_images:,} ({epochs:.1f} epochs)")
if epochs > 100:
    print0("warning: more than 100 epochs: the model will memorise the images; use more of them or a shorter horizon")
if save_every < 0:
    print0("warning: save_every=-1: this run saves no checkpoint to sample from or resume")

if trainable:
    train_only(raw_model, trainable)
timestep_sampler = make_timesteps(timesteps, process)
# Muon or AdamW, one buffer per group, sharded over ranks (ZeRO-1). Weights and state are fp32
betas = (0.9, beta2)
if world == 1 and grad_dtype != "float32":
    raise UserError(f"grad_dtype={grad_dtype!r} would do nothing with one rank")
optim = make_optimizer(raw_model, optimizer, lr, muon_lr, weight_decay, betas, compile, getattr(torch, grad_dtype))
ema = EMA(raw_model, optim, ema_rates, ema_ramp)
scaler = LossScaler(enabled=compute_dtype == torch.float16)  # the identity in bf16 and fp32
if device_batch_size == 0:
    largest = max(codec.shapes, key=math.prod)
    device_batch_size = largest_batch(raw_model, process, largest, autocast, optim, total_batch_size // world)
device_batch_size, grad_accum_steps = cut_batch(total_batch_size, device_batch_size, world)
print0(f"batch: {device_batch_size} x {world} ranks x {grad_accum_steps} micro-steps = {total_batch_size:,} images")

if latent_norm != "channels" and codec.description["kind"] == "images":
    raise UserError(f"latent_norm={latent_norm!r} would do nothing: {data} holds images, and no autoencoder is given")
if bpd_every >= 0 and codec.description["kind"] != "images":
    raise UserError(f"bpd_every={bpd_every}: bits/dim are of pixels, and {data} holds latents; -1 = never")
guidance = choose_guidance(cfg_scale, cfg_interval, can_guide=num_classes > 0 and label_drop > 0)
sample_settings = SampleSettings(sample_steps, choose_sampler(process, sampler, sample_steps), *guidance)
config |= sample_settings.guidance  # recorded as used
quality = SampleQuality(fid_metric, data, fid_images, codec, model_config, device) if fid_every >= 0 else None

# ---------------------------------------------------------------------------------------------------------------------
# The run folder: one trainer at a time, resumed from its newest intact checkpoint

FIXED = (  # settings that define the model: a resume cannot change them
    "seed", "data", "flip", "latent_norm", "class_cond", "low_res_size", "arch", "depth", "width", "heads",
    "patch_size", "num_res_blocks", "attention_resolutions", "use_scale_shift_norm", "dropout", "objective",
    "noise_schedule", "num_timesteps", "variance", "loss", "rescale_timesteps", "timesteps", "label_drop",
    "total_batch_size", "optimizer", "ema_ramp", "init_from", "trainable", "timestep_shift", "timestep_std",
)  # fmt: skip
model_tag = model_tag or f"{train_set.path.name}_{arch}_d{depth}"
run_dir = run_folder(model_tag)
lock = lock_run(run_dir) if ddp_rank == 0 else None
checkpoint, meta = resume_point(run_dir, resume, config, FIXED)
# All state of the loop that is not in tensors
loop = {"step": 0, "train_time_s": 0.0, "wandb_id": None, "lines": 0, "running_loss": 0.0, "best_val_loss": None}
if checkpoint:
    check_same_data(meta["data"], codec.description, model_tag)
    if meta["model_config"].get("heads") != asdict(model_config).get("heads"):  # no tensor's shape shows it
        raise UserError(f"{model_tag} was trained with another number of attention heads; use another model_tag")
    load_weights(raw_model, load_tensors(checkpoint / "model.pt"), checkpoint)
    optim.load_state_dict(load_tensors(checkpoint / "optim.pt"))
    # An average missing from the checkpoint starts from its weights
    kept = [rate for rate in ema.rates if rate in meta["ema_rates"]]
    ema.load_state_dict({str(rate): load_tensors(checkpoint / f"ema_{rate}.pt") for rate in kept})
    state = load_tensors(checkpoint / "train.pt")
    timestep_sampler.load_state_dict(state["timesteps"])
    scaler.load_state_dict(state["scaler"])
    loop |= meta["loop"]
elif init_from:
    source = load_run(init_from, device, published={"num_heads": heads})
    start_from(raw_model, source, config, codec.description["class_names"] if num_classes else [])
    ema.load_state_dict({})  # averages start from these weights
step = start_step = loop["step"]

described = dict(config=config, data=codec.description, model=asdict(model_config), num_params=num_params)
described |= dict(flops_per_image=flops_per_image, num_iterations=num_iterations)
log = RunLog(run, run_dir, device, described, step, loop["wandb_id"])
loop["wandb_id"] = log.wandb_id
report = LiveReport(run_dir)

# ---------------------------------------------------------------------------------------------------------------------
# The loop: save -> evaluate -> sample -> stop? -> one step -> log


def due(every):
    """Is it time for something that happens every so many steps (0 = only at the end, -1 = never)?"""
    return every >= 0 and (step == num_iterations or (every > 0 and step > 0 and step % every == 0))


def lr_multiplier(step):
    """Linear warmup, constant, linear warmdown to final_lr_frac: a factor on every learning rate."""
    warmup = warmup_ratio * num_iterations
    warmdown = warmdown_ratio * num_iterations
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if step <= num_iterations - warmdown:
        return 1.0
    left = (num_iterations - step) / warmdown
    return left + (1 - left) * final_lr_frac


model = compiled(raw_model, device, num_iterations) if compile else raw_model
draw_device = device if device.type == "cuda" else torch.device("cpu")  # where random numbers are drawn
# A loader thread reads ahead from disk. At step s, micro-step m, rank r gets images from position
# s*total_batch_size + (m*world + r)*device_batch_size onwards of a stream shuffled by (seed, epoch) alone.
loader = DataLoader(train_set, device_batch_size, total_batch_size, ddp_rank, world, seed, step, device)
images, labels = next(loader)  # (B, C, H, W) uint8, or fp16 where they are latents; (B,) int64
stop = StopSignal()  # SIGINT, SIGTERM, SIGHUP: finish the step, save (unless save_every=-1), exit; a second kills
stopping = 0  # number of the signal received
loss_terms = LossTerms(process)
steps_since, seconds_since, data_wait_since = 0, 0.0, 0.0  # since the last log line
shapes_trained = set()
saved_step = start_step if checkpoint else -1
saver = Saver()

while True:
    # Save before the slow evaluations, so that a crash there loses nothing
    if (due(save_every) or (stopping and save_every >= 0)) and step != saved_step:
        optim_state, averages = optim.state_dict(), ema.state_dict()  # gathered over ranks: all take part
        if ddp_rank == 0:
            tensors = dict(model=host_copy(raw_model.state_dict()), optim=optim_state)
            tensors["train"] = dict(timesteps=timestep_sampler.state_dict(), scaler=scaler.state_dict())
            for rate, average in averages.items():
                tensors[f"ema_{rate}"] = average
            meta = dict(step=step, arch=arch, config=config, model_config=asdict(model_config), data=codec.description)
            meta |= dict(ema_rates=list(ema.rates), loop=loop | {"step": step})
            saver.start(run_dir, step, tensors, meta, checkpoints_kept)  # in a thread: training goes on
        saved_step = step

    # A signal ends an evaluation between batches. Evaluations run eagerly: compiling for so few batches takes longer
    with stop.interrupts(), uncompiled():
        # Validation loss of the raw weights and of their average, on the same images, t and noise each time.
        # ema.applied also sets eval mode.
        if due(eval_every) and not stopping:
            given = (process, val_set, codec, eval_images, device_batch_size, seed)
            raw_model.eval()
            with autocast:
                val_loss, _ = validation_loss(raw_model, *given)
            raw_model.train()
            with autocast, ema.applied(raw_model):
                val_loss_ema, by_t = validation_loss(raw_model, *given)
            loop["best_val_loss"] = min(val_loss_ema, loop["best_val_loss"] or val_loss_ema)
            quarters = " ".join("-" if math.isnan(q) else f"{q:.4f}" for q in by_t)
            averaged = f"average {val_loss_ema:.4f} (best {loop['best_val_loss']:.4f})"
            print0(f"step {step:05d} | val loss {val_loss:.4f} | {averaged}, by quarter of t {quarters}")
            val = {f"val/loss_q{i}": q for i, q in enumerate(by_t)}
            log.metrics({"step": step, "val/loss": val_loss, "val/loss_ema": val_loss_ema} | val)

        # Bits/dim of a Gaussian diffusion: the variational bound on the negative log-likelihood (IDDPM, section 3)
        if due(bpd_every) and not stopping:
            with autocast, ema.applied(raw_model):
                bpd = bits_per_dim(raw_model, process, val_set, codec, eval_images, device_batch_size)["total_bpd"]
            print0(f"step {step:05d} | {bpd:.4f} bits/dim")
            log.metrics({"step": step, "val/bpd": bpd})

        # Samples compared with the training images: Frechet and kernel distance, precision, recall
        if due(fid_every) and not stopping:
            with autocast, ema.applied(raw_model):
                found = quality.measure(raw_model, process, codec, sample_settings, device_batch_size)
            figures = " | ".join(f"{name} {value:.4g}" for name, value in found.items())
            print0(f"step {step:05d} | {fid_images:,} samples | {figures}")
            log.metrics({"step": step} | {f"val/{name}": value for name, value in found.items()})

        # The vibe check: a grid of the averaged weights, from the same noise and classes each time, drawn by all ranks
        if due(sample_every) and not stopping:
            with autocast, ema.applied(raw_model):
                grid = sample_grid(raw_model, process, val_set or train_set, codec, sample_settings, device_batch_size)
            log.grid(grid, step)
    if stop.interrupted and not stopping:
        stopping = stop.interrupted
        continue  # to save and exit

    leaving = step == num_iterations or bool(stopping)
    if ddp_rank == 0 and (leaving or due(eval_every) or due(sample_every)):
        report.refresh(leaving)
    if leaving:
        break

    # -----------------------------------------------------------------------------------------------------------------
    saver.check()
    # One step. Its randomness, for the whole batch of all ranks, is a function of (seed, step). So, up to the order of
    # floating-point sums, the model depends neither on the number of ranks nor on device_batch_size (except for dropout
    # masks), and the same command resumes identically without saving a random number generator's state.
    t0 = time.perf_counter()
    g = make_generator(seed, step, device=draw_device)
    u_flip, u_t, u_drop = torch.rand(3, total_batch_size, generator=g, device=draw_device).to(device)  # (N,) in [0, 1)
    # Draw t by inverse CDF. Where t is importance-sampled (loss-second-moment), the weight keeps the
    # loss an unbiased mean over uniform t. Logit-normal t emphasises the middle on purpose: its weight is 1.
    t, t_weight = timestep_sampler.sample(u_t)  # (N,), (N,)
    # The batch is cut into micro-batches that fit into memory: gradients add up in p.grad over all micro-steps
    for micro_step in range(grad_accum_steps):
        first = (micro_step * world + ddp_rank) * device_batch_size
        rows = slice(first, first + device_batch_size)  # this rank's rows of the global batch
        # Stored uint8 become [-1, 1]. A stored latent is a distribution N(mean, std): each step trains on a new sample
        flips = u_flip[rows] < 0.5 if flip else None
        vae_noise = functools.partial(draw_rows, (seed, step, 2), first, draw_device)
        x0 = codec.to_x0(images, flips, vae_noise)  # (B, C, H, W) fp32; all images of a step have one shape
        # Large tensors: each rank draws only its own rows of a table that is a function of (seed, step, 1)
        noise = draw_rows((seed, step, 1), first, draw_device, x0)
        # Drop some labels, so that the model also learns to denoise without them: guidance needs both
        y = torch.where(u_drop[rows] < label_drop, num_classes, labels)  # num_classes is the null class
        if dropout:  # its masks depend on (seed, step) and on how the batch is cut
            torch.manual_seed(make_generator(seed, step, 3, first).initial_seed())
        # The default loss is flow matching on straight paths (nanodiff/diffusion/flow.py), with t in [0, 1]:
        #     x_t = (1 - t) * x0 + t * noise
        #     loss = mean((model(x_t, 1000 * t, y) - (noise - x0))^2)
        # The model predicts the velocity dx_t/dt = noise - x0. Sampling integrates it from noise at t = 1 to an image
        # at t = 0. With objective=eps the model predicts the noise of a Gaussian diffusion (diffusion/gaussian.py).
        with autocast:
            terms = process.losses(model, x0, t[rows], noise, **conditioning(model_config, x0, y))
        loss = (terms["loss"] * t_weight[rows]).mean() / grad_accum_steps  # backward() sums over micro-steps
        # The last micro-step completes gradients: ranks send each part while backward still computes the next
        optim.last_micro_step = micro_step == grad_accum_steps - 1
        scaler.scale(loss).backward()
        loss_terms.add(t[rows], t_weight[rows], terms)
        # Take the next micro-batch, already read by the loader's thread, while the GPU is busy with this one
        images, labels = next(loader)
        data_wait_since += loader.data_wait
    # loss-second-moment learns here at which t the losses are large; other distributions ignore it
    timestep_sampler.update(*loss_terms.end_step())

    # Finish the only gradient exchange, one per step for any number of micro-steps: reduce-scatters leave each rank the
    # average gradient of its share of the parameters. optim.step() updates that share and all-gathers the weights. Here
    # the host waits for the GPU, once per step. A signal to one rank stops all after the same step: its number is sent
    # with the norm, and the top of the loop then saves and exits.
    grad_norm, stopping = optim.sync_grads(stop.received)  # global L2 norm; both equal on all ranks
    grad_norm *= scaler.inv_scale
    overflow = not math.isfinite(grad_norm)
    # In fp16 an overflow skips the step and lowers the loss scale. Else a NaN ends the run here, before the update,
    # with an error that names step, rank and parameter; weights and newest checkpoint stay intact.
    if overflow and not scaler.enabled:
        where = optim.not_finite()
        raise FloatingPointError(f"step {step}: loss {loss.item():g}, gradient not finite ({where})")
    lrm = lr_multiplier(step)
    for group in optim.param_groups:
        group["lr"] = group["initial_lr"] * lrm
    if not overflow:
        # One factor clips the global norm and undoes the loss scale
        clip = min(1.0, grad_clip / (grad_norm + 1e-6)) if grad_clip > 0 else 1.0
        optim.step(grad_scale=clip * scaler.inv_scale)
        ema.update(step + 1)
    scaler.update(overflow)
    optim.zero_grad()
    step += 1
    log_now = step % log_every == 0 or step == num_iterations or stopping
    first_of_shape = x0.shape not in shapes_trained
    shapes_trained.add(x0.shape)
    if log_now or first_of_shape:
        synchronize(device)  # so that logged times include the GPU's work; else the next step is queued meanwhile
    dt = time.perf_counter() - t0
    loop["train_time_s"] += dt
    if first_of_shape and not log_now:  # torch.compile takes most of it: left out of img/s and eta
        print0(f"first step: {dt:.1f} s (shape {len(shapes_trained)} of {len(codec.shapes)})")
    else:
        steps_since += 1
        seconds_since += dt
    # After the first step everything is allocated and compiled: from here on Python's garbage collector only costs time
    if step == start_step + 1:
        gc.collect()
        gc.freeze()
        gc.disable()
    elif step % 5000 == 0:
        gc.collect()

    if log_now:
        dt_ms = 1000 * seconds_since / steps_since
        img_per_sec = 1000 * total_batch_size / dt_ms
        # Model FLOPs utilisation: the FLOPs that forward and backward need (without recomputation), as a
        # percentage of the peak of all devices
        mfu = 100 * flops_per_image * img_per_sec / (peak * world)
        line = {
            "step": step,
            "images_seen": step * total_batch_size,
            "total_training_flops": step * total_batch_size * flops_per_image,
            "total_training_time_s": loop["train_time_s"],
            "train/grad_norm": grad_norm,
            "train/lrm": lrm,
            "train/dt_ms": dt_ms,
            "train/data_ms": 1000 * data_wait_since / steps_since,
            "train/images_per_sec": img_per_sec,
            "train/mfu": mfu,
        }
        line |= loss_terms.summary(loop, device)  # train/loss: the mean over all images since the last line
        if scaler.enabled:
            line["train/lg_loss_scale"] = scaler.lg_loss_scale
        log.metrics(line)
        minutes, eta = loop["train_time_s"] / 60, (num_iterations - step) * dt_ms / 60_000
        print0(
            f"step {step:05d}/{num_iterations:05d} ({100 * step / num_iterations:.1f}%) | "
            f"loss {line['train/loss']:.4f} (running {line['train/loss_running']:.4f}) | grad {grad_norm:.2f} | "
            f"lr {lrm:.2f} | dt {dt_ms:.1f} ms | img/s {img_per_sec:,.0f} | mfu {mfu:.1f} | "
            f"{minutes:.1f} m | eta {eta:.1f} m"
        )
        steps_since, seconds_since, data_wait_since = 0, 0.0, 0.0

# ---------------------------------------------------------------------------------------------------------------------
# The end

loader.close()
saver.wait()
end(log, step, stopping, loop["train_time_s"], device)
