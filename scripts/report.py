"""
Write the report of a run, or one page that overlays several; print its path.

    python3 -m scripts.report                     # the run started last: runs/<tag>/report.html
    python3 -m scripts.report RUN                 # a run by its tag or folder
    python3 -m scripts.report RUN_A RUN_B ...     # overlaid: compare_RUN_A_RUN_B.html beside RUN_A
"""

import os
import sys

from configurator import configure
from nanodiff.common import UserError, base_dir, print0
from nanodiff.files import reading
from nanodiff.formats.load import find_run
from nanodiff.web.report import write_report

configure(globals(), [arg for arg in sys.argv[1:] if arg.startswith("-")])  # the other arguments are runs

configs = sorted((base_dir() / "runs").glob("*/config.json"), key=os.path.getmtime)
runs = [arg for arg in sys.argv[1:] if not arg.startswith("-")] or [str(path.parent) for path in configs[-1:]] or [""]
run_dirs = list(dict.fromkeys(find_run(run).resolve() for run in runs))
for path in run_dirs:
    if not path.is_dir():
        raise UserError(f"{path} is a file, without a log; accepted: a run's tag or folder")
path = run_dirs[0] / "report.html"
if len(run_dirs) > 1:
    name = "_".join(folder.name for folder in run_dirs)
    path = run_dirs[0].parent / f"compare_{name[:200]}.html"
with reading(" or ".join(map(str, run_dirs)), "has a file that is not as this version writes it"):
    write_report(run_dirs, path)
print0(path)
