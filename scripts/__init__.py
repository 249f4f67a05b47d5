"""Programs: `python -m scripts.NAME`."""

import sys


def _excepthook(kind, error, traceback):
    """Ctrl-C while torch is still being imported is one line too; nanodiff.common's hook then takes over."""
    if issubclass(kind, KeyboardInterrupt):
        print("stopped by Ctrl-C", file=sys.stderr)
        sys.exit(130)
    sys.__excepthook__(kind, error, traceback)


if sys.excepthook is sys.__excepthook__:
    sys.excepthook = _excepthook
