#!/usr/bin/env bash
# Train on several machines: start this on each, with the same arguments. They meet at HEAD, the first machine, and share
# $NANODIFF_BASE_DIR (a network file system). If a worker dies, all resume from the newest checkpoint.
#   NNODES=2 HEAD=node0:29500 bash runs/multinode.sh runs/imagenet256.py --depth=24
# Under Slurm, srun starts it on each machine:
#   sbatch --nodes=2 --ntasks-per-node=1 --gpus-per-node=8 --wrap='srun bash runs/multinode.sh runs/imagenet256.py'
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

if [ -n "${SLURM_JOB_NODELIST:-}" ]; then
    NNODES=${NNODES:-$SLURM_NNODES}
    HEAD=${HEAD:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):29500}
fi
[ -n "${HEAD:-}" ] || { echo "error: give HEAD=HOST:PORT, the first machine, and NNODES=2, their number" >&2; exit 2; }

# By default torchrun kills its workers 30 s after a signal; saving a large model takes longer. After this time it also kills
# ranks that wait for a dead one in a collective, which no signal interrupts
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=120
export PET_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2  # the last two would kill torchrun alone
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # a shared store would give restarted ranks addresses of dead ones
# exec: a signal to this script reaches torchrun, which passes it on to the ranks
exec python3 -m torch.distributed.run --nnodes="${NNODES:-2}" --nproc_per_node="${GPUS:-8}" --max-restarts=3 --rdzv_id="${SLURM_JOB_ID:-nanodiff}" \
    --rdzv_backend=c10d --rdzv_endpoint="$HEAD" -m scripts.base_train -- "$@"
