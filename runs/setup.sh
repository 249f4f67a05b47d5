# Sourced by the scripts of this folder: go to the repository root, make .venv with the pinned packages, put it first in
# PATH. A copy of requirements.txt in .venv records what is installed, so that later runs skip this.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if ! [ -x .venv/bin/pip ]; then
    for python in python3 python3.13 python3.12 python3.11 ""; do
        "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && break
    done
    if [ -z "$python" ]; then
        echo "error: Python 3.11 or newer not found; tried python3, python3.13, python3.12, python3.11" >&2
        exit 2
    fi
    "$python" -m venv .venv  # on Debian and Ubuntu this needs: apt install python3-venv
fi
if ! cmp -s requirements.txt .venv/requirements.txt; then
    echo "installing requirements.txt into .venv, which takes a few minutes the first time"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
    cp requirements.txt .venv/requirements.txt
fi
export PATH="$PWD/.venv/bin:$PATH"
