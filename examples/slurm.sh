#!/bin/bash
# sbatch examples/slurm.sh smoke: a suite on 2 nodes with 8 GPUs each. srun starts one process a rank; a world that is
# smaller than the job is its first ranks. `results` must lie on a file system that all nodes share.
#SBATCH --job-name=zerobench
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=4
#SBATCH --time=01:00:00

set -euo pipefail
export OMP_NUM_THREADS=1

# Process 0 is on the first node, at a port that follows from the job's number; MASTER_ADDR and MASTER_PORT choose others,
# GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME the network. One process that is lost ends the job: submit it again, with
# --resume and the results file.
srun --kill-on-bad-exit=1 python -m zerobench run "$@" --results results

# The same with torchrun, one a node:
#   srun --ntasks-per-node=1 torchrun --nnodes="$SLURM_NNODES" --nproc-per-node=8 --rdzv-backend=c10d \
#       --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):29500" \
#       -m zerobench run "$@" --results results
