#!/usr/bin/env bash
#SBATCH --job-name=megatron_ext
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=01:00:00
# The same as two_nodes.sh as a Slurm job, submitted in the root of the working tree:
#   sbatch examples/ranks/slurm.sh --load DIR --prompt-file prompts.jsonl --output-path out/results.json
# Not run by any test, since that takes a cluster: `bash -n` and its flags are checked.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?submit this with sbatch}"

PYTHON=${PYTHON:-.venv/bin/python} # made by `make setup`, and readable on all nodes
DEVICES=${DEVICES:-8} # as in --gpus-per-node
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
srun --kill-on-bad-exit=1 "$PYTHON" -m torch.distributed.run \
    --nnodes "$SLURM_NNODES" --nproc-per-node "$DEVICES" \
    --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$MASTER_ADDR:${MASTER_PORT:-29500}" \
    tools/run_inference.py --tensor-model-parallel-size "$DEVICES" --pipeline-model-parallel-size "$SLURM_NNODES" \
    --distributed-timeout-minutes 10 "$@"
