"""Refuse settings that do not fit a run's data, and changed ones when it resumes."""

from pathlib import Path

from nanodiff.common import UserError, print0
from nanodiff.conditions import DataInfo
from nanodiff.diffusion.process import OBJECTIVES, learns_guidance

# Settings that a resumed run may change freely, since they do not shape the weights; `data` may move, as its hashes
# are compared (check_same_data)
FREE = set(
    """
    run model_tag data resume device_type compile deterministic device_batch_size checkpointing autoencoder ema_rates
    eval_every eval_images fid_every fid_images fid_metric sample_every sample_steps sampler cfg_scale
    cfg_interval save_every checkpoints_kept log_every
    """.split()
)

# Settings that it may change with --resume=changed or --resume=STEP. All others are fixed
RATES = set(
    """
    num_iterations num_epochs target_flops target_param_data_ratio lr muon_lr weight_decay beta2 grad_clip
    warmup_ratio warmdown_ratio guided_from dtype fp8
    """.split()
)


DERIVED = "num_iterations device_batch_size dtype".split()


def check_settings(checkpoint: Path, meta: dict, config) -> None:
    """Refuse settings that differ from the checkpoint's, unless they are FREE or, on request, RATES.

    `config` is a configurator.Config. A setting missing from the checkpoint had its default.
    """
    tag = checkpoint.parents[1].name
    changes = {}
    for key, value in config.items():
        was = meta["config"].get(key, config.defaults[key])
        # 0 steps train nothing, 0 images are yet to be derived; -1 was derived from the other settings of the horizon,
        # which are compared. Older runs did not record what "auto" was
        is_open = key in DERIVED and (value == 0 or was in (-1, "auto"))
        if value != was and not is_open:
            changes[key] = f"{key}={value!r} (was {was!r})"
    free = FREE - {"cfg_scale", "cfg_interval"} if learns_guidance(config) else FREE
    if config["init_from"] and meta.keys() & {"lora", "teacher"}:  # it may move: open_source compares what it reads
        free = free | {"init_from"}
    fixed = [text for key, text in changes.items() if key not in free | RATES]
    if fixed:
        raise UserError(f"{tag} was trained with other settings: {', '.join(fixed)}; use another model_tag")
    rates = [text for key, text in changes.items() if key in RATES]
    if rates and config["resume"] == "auto":
        hint = "--model_tag=NAME for a new run, or --resume=changed to continue with them"
        raise UserError(f"{tag} was trained with other settings: {', '.join(rates)}; give {hint}")
    step = meta["step"]
    if learns_guidance(meta["config"], step) > learns_guidance(config, step):
        raise UserError(f"{tag} has learned guidance by step {step}; accepted: an earlier guided_from")
    if 0 < config["num_iterations"] < step:
        raise UserError(
            f"num_iterations={config['num_iterations']}: {checkpoint} is at step {step}; accepted: {step} or more, or 0"
        )
    now = f", now with {', '.join(changes.values())}" if changes else ""
    print0(f"resumed from {checkpoint}{now}")


def refuse_useless(config, data: DataInfo, conditions: list[str], is_resumed) -> None:
    """Raise UserError for settings of base_train that do not fit the data or each other.

    `config`: a configurator.Config; `conditions`: those that training drops.
    """
    kind, _ = OBJECTIVES[config["objective"]]
    is_latent = data.kind == "latents"
    if kind.is_map and config.overrides.keys() & {"timesteps", "timestep_std", "t_range"} and not is_resumed:
        raise UserError("a flow map draws t by its own rule; accepted: no timesteps, timestep_std, t_range")
    if config["objective"] == "eps" and config["noise_schedule"] == "cosine" and is_latent and not is_resumed:
        raise UserError("objective=eps on latents draws noise with noise_schedule=cosine; accepted: linear")
    if config["warmup_ratio"] + config["warmdown_ratio"] > 1:
        raise UserError("warmup_ratio and warmdown_ratio must not sum to more than 1")
    can_learn = conditions and config["label_drop"] > 0 and config["cfg_scale"] > 1
    if config["guided_from"] < 1 and not can_learn:
        raise UserError(
            f"guided_from={config['guided_from']} needs classes, vectors or second images, label_drop > 0 and "
            "cfg_scale > 1; accepted: 1"
        )
