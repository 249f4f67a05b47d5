"""Lets `python scripts/base_train.py` run like `python3 -m scripts.base_train`: Python finds this file first, and it
imports the real configurator."""

import sys
from pathlib import Path

del sys.modules[__name__]
sys.path[0] = str(Path(__file__).resolve().parent.parent)
import scripts  # noqa: E402, F401 (its excepthook)
from configurator import configure  # noqa: E402, F401
