#!/usr/bin/env bash
# All checks: set-up, style, tests. Arguments go to pytest: bash runs/test.sh -m "not slow" tests/test_flow.py
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
python -m ruff check .
python -m ruff format --check .
python -m pytest -n auto --maxprocesses=4 --dist=worksteal "$@"
