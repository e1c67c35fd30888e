#!/usr/bin/env bash
# The same as run_inference.sh, started with torchrun. This version runs on one rank.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON=${PYTHON:-.venv/bin/python} # made by `make setup`
mkdir -p out
exec "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 1 \
    tools/run_inference.py --tensor-model-parallel-size 1 --output-path out/results.json "$@"
