"""wandb, or what stands in for it."""

import base64
from pathlib import Path

from nanodiff.common import UserError, get_dist


class DummyWandb:
    """Stands in for a Wandb run when run="dummy" and on ranks > 0: same calls, no effect."""

    id = None

    def log(self, line: dict, step: int):
        pass

    def log_png(self, name: str, png: bytes, step: int):
        pass

    def finish(self):
        pass


class Wandb:
    """A wandb run, going on with `run_id` where there is one. wandb is imported here and nowhere else."""

    def __init__(self, run: str, config: dict, run_dir: Path, run_id: str | None):
        try:
            import wandb
        except ImportError:
            raise UserError(f"run={run!r} logs to wandb, which is not installed: pip install wandb") from None
        self.html = wandb.Html
        self.run = wandb.init(project="nanodiff", name=run, id=run_id, resume="allow", dir=run_dir, config=config)
        self.id, self.log, self.finish = self.run.id, self.run.log, self.run.finish

    def log_png(self, name, png, step):  # as HTML, since wandb.Image would need Pillow
        picture = base64.b64encode(png).decode()
        self.run.log({name: self.html(f'<img src="data:image/png;base64,{picture}">')}, step=step)


def start_wandb(run: str, config: dict, run_dir: Path, run_id: str | None) -> Wandb | DummyWandb:
    """Wandb on rank 0, unless run="dummy"; DummyWandb elsewhere."""
    return DummyWandb() if run == "dummy" or get_dist()[0] > 0 else Wandb(run, config, run_dir, run_id)
