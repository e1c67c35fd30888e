#!/usr/bin/env bash
# Two pipeline stages, each with half of the embedded model's layers. It spreads memory and does not make a step faster.
# Layers that stages cannot share evenly go to the first ones; --num-layers-in-first-pipeline-stage N and
# --num-layers-in-last-pipeline-stage N say otherwise. RANKS=4 for more stages.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

PYTHON=${PYTHON:-.venv/bin/python} # made by `make setup`
RANKS=${RANKS:-2}
exec "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$RANKS" \
    tools/run_inference.py --pipeline-model-parallel-size "$RANKS" "$@"
