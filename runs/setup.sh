# Sourced by the scripts of this folder: go to the repository root and provide a python3 with torch and numpy. A python3
# that has them is used as it is: machines with GPUs often have their own torch, and no network. Else the pinned packages
# are installed into the virtual environment $NANODIFF_VENV, by default .venv; NANODIFF_VENV=.venv forces that.
# A copy of requirements.txt there records the installation, so that later runs skip it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# find_trained TAG "$@": set `run` to the --model_tag among base_train's arguments, else to TAG; `folder` to the run's; and
# `samples` to a file name for samples of its newest checkpoint
find_trained() {
    local argument step
    run=$1
    for argument in "${@:2}"; do
        case $argument in --model_tag=*) run=${argument#*=} ;; esac
    done
    folder=${NANODIFF_BASE_DIR:-$HOME/.cache/nanodiff}/runs/$run
    step=$(ls "$folder/checkpoints" 2> /dev/null | sort -V | tail -n 1) || true
    samples=$folder/measured_$step.npz
}

# need_gpu HINT: end here, instead of after days, if torch sees no GPU
need_gpu() {
    local see='import sys, torch; sys.exit(not (torch.cuda.is_available() or torch.backends.mps.is_available()))'
    python3 -c "$see" || { echo "error: there is no GPU here; $1" >&2; exit 2; }
}

present="
import sys, numpy, torch${needs:+, $needs}
enough = sys.version_info >= (3, 11) and tuple(map(int, torch.__version__.split('.')[:2])) >= (2, 10)
print(f'{sys.executable}, torch {torch.__version__}') if enough else sys.exit(1)"
if [ -z "${NANODIFF_VENV:-}" ] && found=$(python3 -c "$present" 2> /dev/null); then
    echo "using $found; nothing is installed"
    return
fi

venv=${NANODIFF_VENV:-.venv}
if ! [ -x "$venv/bin/pip" ]; then
    for python in python3 python3.13 python3.12 python3.11 ""; do
        "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && break
    done
    if [ -z "$python" ]; then
        echo "error: Python 3.11 or newer not found; tried python3, python3.13, python3.12, python3.11" >&2
        exit 2
    fi
    "$python" -m venv "$venv"  # on Debian and Ubuntu this needs: apt install python3-venv
fi
if ! cmp -s requirements.txt "$venv/requirements.txt"; then
    echo "installing requirements.txt into $venv, which takes a few minutes the first time"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -r requirements.txt
    cp requirements.txt "$venv/requirements.txt"
fi
PATH=$(cd "$venv/bin" && pwd):$PATH
export PATH
