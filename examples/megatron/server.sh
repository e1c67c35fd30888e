#!/usr/bin/env bash
# An OpenAI server of a hybrid checkpoint of Megatron-LM with a Hugging Face tokenizer, at port 5000 as in Megatron.
#   CHECKPOINT_DIR=checkpoints TOKENIZER_MODEL=tokenizer examples/megatron/server.sh
# Flags after the script's name override those below. RANKS=8 for tensor parallelism.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

PYTHON=${PYTHON:-$ROOT/.venv/bin/python} # made by `make setup`
CHECKPOINT_DIR=${CHECKPOINT_DIR:?directory of a torch_dist checkpoint}
TOKENIZER_MODEL=${TOKENIZER_MODEL:?directory of a Hugging Face tokenizer, or its tokenizer.json}
RANKS=${RANKS:-1}
exec "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$RANKS" \
    "$ROOT/tools/run_server.py" --load "$CHECKPOINT_DIR" --use-checkpoint-args --model-provider hybrid --bf16 \
    --tensor-model-parallel-size "$RANKS" \
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER_MODEL" \
    --inference-max-seq-length 4096 --enable-chunked-prefill \
    --inference-dynamic-batching-buffer-size-gb 20 \
    --inference-dynamic-batching-prefix-caching --inference-dynamic-batching-prefix-caching-eviction-policy lru \
    --inference-dynamic-batching-prefix-caching-mamba-gb 4 \
    --inference-logging-step-interval 50 --port 5000 "$@"
