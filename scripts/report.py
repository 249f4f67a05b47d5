"""
Write the report of a run, or one page that overlays several; print its path.

    python -m scripts.report                     # the newest run: runs/<tag>/report.html
    python -m scripts.report RUN                 # a run by its tag or folder
    python -m scripts.report RUN_A RUN_B ...     # up to eight: compare_RUN_A_RUN_B.html beside RUN_A
"""

import sys

from nanodiff.common import UserError, print0
from nanodiff.formats.load import find_run
from nanodiff.web.report import write_report

args = sys.argv[1:]
if any(arg.startswith("-") for arg in args) or len(args) > 8:
    raise UserError(f"{' '.join(args)!r}; accepted: tags or folders of up to 8 runs, or nothing for the newest run")
run_dirs = list(dict.fromkeys(find_run(arg).resolve() for arg in args or [""]))
path = run_dirs[0] / "report.html"
if len(run_dirs) > 1:
    path = run_dirs[0].parent / f"compare_{'_'.join(folder.name for folder in run_dirs)[:200]}.html"
write_report(run_dirs, path)
print0(path)
