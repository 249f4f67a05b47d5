#!/usr/bin/env bash
# All checks: set-up, style, tests. Arguments go to pytest: bash runs/test.sh -m "not slow" tests/test_flow.py
needs="pytest, ruff, xdist"
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
python3 -m ruff check .
python3 -m ruff format --check .
python3 -m pytest -n 3 --dist=worksteal "$@"
