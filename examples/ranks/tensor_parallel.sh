#!/usr/bin/env bash
# Two ranks that share each layer, on the embedded model and the shipped prompts. Any flag of tools/run_inference.py can
# follow; with CUDA each rank takes a device of its own. RANKS=8 for more, as far as the model's heads and groups allow.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

PYTHON=${PYTHON:-.venv/bin/python} # made by `make setup`
RANKS=${RANKS:-2}
exec "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$RANKS" \
    tools/run_inference.py --tensor-model-parallel-size "$RANKS" "$@"
