#!/usr/bin/env bash
#SBATCH --job-name=megatron_ext
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=01:00:00
# The same as two_nodes.sh as a Slurm job, with a replica for each node, submitted in the root of the working tree:
#   sbatch examples/ray_serve/slurm.sh model=/models/mine num_gpus=1
# ~/.ray/auth_token has to be there on all nodes, as with a shared home directory.
# Not run by any test, since that takes a cluster: `bash -n` and its settings are checked.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?submit this with sbatch}"

HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
export HEAD
# shellcheck disable=SC2016 # SLURM_NODEID is each task's own
srun --kill-on-bad-exit=1 bash -c 'NODE=$SLURM_NODEID exec examples/ray_serve/two_nodes.sh "$@"' two_nodes \
    num_replicas="$SLURM_NNODES" "$@"
