#!/usr/bin/env bash
# Two replicas that have half of the experts each: prompt i is served by replica i mod 2, and tokens travel to whoever has
# their experts. The package has no weights with experts, so this model's are random and its prompts are token ids.
# For a real one: --load or --load-hf and --prompt-file in place of the flags below, and RANKS=8.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

PYTHON=${PYTHON:-.venv/bin/python} # made by `make setup`
RANKS=${RANKS:-2}
if [ $# -eq 0 ]; then
    set -- --prompt-file examples/ranks/ids.jsonl --num-tokens-to-generate 8
fi
exec "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$RANKS" \
    tools/run_inference.py --expert-model-parallel-size "$RANKS" \
    --hybrid-override-pattern 'ME*EME*E' --hidden-size 128 --num-attention-heads 4 --num-experts 8 --moe-ffn-hidden-size 64 \
    --moe-shared-expert-intermediate-size 64 --mamba-head-dim 32 --mamba-num-groups 2 --mamba-state-dim 32 \
    --tokenizer-type NullTokenizer --vocab-size 512 --max-position-embeddings 2048 "$@"
