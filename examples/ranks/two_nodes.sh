#!/usr/bin/env bash
# Two machines: each layer is shared by the devices of one machine, and each machine has one pipeline stage, so that only
# hidden states and messages cross between them. Start it on both, with the same MASTER_ADDR (the first one's name):
#   MASTER_ADDR=first NODE=0 examples/ranks/two_nodes.sh --load DIR --prompt-file prompts.jsonl     # on the first
#   MASTER_ADDR=first NODE=1 examples/ranks/two_nodes.sh --load DIR --prompt-file prompts.jsonl     # on the second
# The first machine reads prompts and writes results; checkpoints have to be readable on both.
# Not run by any test, since that takes two machines: `bash -n` and its flags are checked.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

PYTHON=${PYTHON:-.venv/bin/python} # made by `make setup`
NODE=${NODE:?which machine this is: 0 or 1}
MASTER_ADDR=${MASTER_ADDR:?the name of the first machine}
MASTER_PORT=${MASTER_PORT:-29500}
DEVICES=${DEVICES:-8} # of each machine
exec "$PYTHON" -m torch.distributed.run --nnodes 2 --node-rank "$NODE" --nproc-per-node "$DEVICES" \
    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" \
    tools/run_inference.py --tensor-model-parallel-size "$DEVICES" --pipeline-model-parallel-size 2 \
    --distributed-timeout-minutes 10 "$@"
