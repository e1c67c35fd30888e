#!/usr/bin/env bash
# A GPT checkpoint of Megatron-LM with the two files of GPT2BPETokenizer.
#   CHECKPOINT_DIR=checkpoints VOCAB_FILE=gpt2-vocab.json MERGE_FILE=gpt2-merges.txt examples/megatron/gpt.sh \
#       --prompts "Time travel to 2008"
# Flags after the script's name override those below. RANKS=8 for tensor parallelism.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

PYTHON=${PYTHON:-$ROOT/.venv/bin/python} # made by `make setup`
CHECKPOINT_DIR=${CHECKPOINT_DIR:?directory of a torch_dist checkpoint}
VOCAB_FILE=${VOCAB_FILE:?vocabulary of the tokenizer, JSON}
MERGE_FILE=${MERGE_FILE:?merges of the tokenizer}
RANKS=${RANKS:-1}
exec "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$RANKS" \
    "$ROOT/tools/run_inference.py" --load "$CHECKPOINT_DIR" --use-checkpoint-args --model-provider gpt --bf16 \
    --tensor-model-parallel-size "$RANKS" \
    --tokenizer-type GPT2BPETokenizer --vocab-file "$VOCAB_FILE" --merge-file "$MERGE_FILE" \
    --inference-dynamic-batching-buffer-size-gb 20 --inference-dynamic-batching-prefix-caching \
    --temperature 1.0 --top_k 1 --num-tokens-to-generate 30 "$@"
