"""Programs: `python3 -m scripts.NAME`."""

import os
import sys
from contextlib import suppress


def _excepthook(kind, *error):
    """Call nanodiff.common.excepthook once it is imported. Ctrl-C prints one line even while torch is imported."""
    if issubclass(kind, KeyboardInterrupt):
        print("stopped by Ctrl-C", file=sys.stderr)
        sys.exit(130)
    hook = getattr(sys.modules.get("nanodiff.common"), "excepthook", sys.__excepthook__)
    hook(kind, *error)


sys.excepthook = _excepthook
sys.stderr = sys.stderr or sys.stdout or open(os.devnull, "w")  # None if it is closed
with suppress(AttributeError):  # of a notebook's, or of none
    sys.stdout.reconfigure(errors="replace")  # it may lack the letters of a file's or class's name
