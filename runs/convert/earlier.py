"""Convert a run from before 2026-11-25, whose weights are .pt files, in place: python -m runs.convert.earlier FOLDER"""

import sys
from pathlib import Path

from nanodiff.files import load_tensors
from nanodiff.training.checkpoint import list_checkpoints, load_meta, save_checkpoint

run_dir = Path(sys.argv[1])
for step, checkpoint in list_checkpoints(run_dir):
    if (checkpoint / "model.pt").exists():
        meta = load_meta(checkpoint)
        config = meta["config"]
        config["gaussian_loss"] = config.pop("loss", config.get("gaussian_loss", "mse"))  # the setting's new name
        tensors = {path.stem: load_tensors(path) for path in checkpoint.glob("*.pt")}
        print(f"converted {save_checkpoint(run_dir, step, tensors, meta)}")
print("its samples stay the same bytes; resumed, it takes the images of an epoch in another order than it began with")
