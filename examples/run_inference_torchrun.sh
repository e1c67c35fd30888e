#!/usr/bin/env bash
# The same as run_inference.sh, started with torchrun, on one rank; examples/ranks/ has those of several.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON=${PYTHON:-.venv/bin/python} # made by `make setup`
mkdir -p out
exec "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 1 \
    tools/run_inference.py --output-path out/results.json "$@"
