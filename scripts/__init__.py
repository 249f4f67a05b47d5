"""Programs: `python -m scripts.NAME`."""

import sys


def _excepthook(kind, error, traceback):
    """nanodiff.common's, once that is imported; while torch still is, Ctrl-C prints one line, too."""
    common = sys.modules.get("nanodiff.common")
    if hasattr(common, "excepthook"):
        return common.excepthook(kind, error, traceback)
    if issubclass(kind, KeyboardInterrupt):
        print("stopped by Ctrl-C", file=sys.stderr)
        sys.exit(130)
    sys.__excepthook__(kind, error, traceback)


if sys.excepthook is sys.__excepthook__:
    sys.excepthook = _excepthook
