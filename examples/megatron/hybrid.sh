#!/usr/bin/env bash
# A hybrid Transformer-Mamba checkpoint of Megatron-LM with its TikTokenizer vocabulary; blocks and states are cached.
#   CHECKPOINT_DIR=checkpoints TOKENIZER_MODEL=multiMixV8.vocab.json examples/megatron/hybrid.sh --prompts "Time travel"
# Flags after the script's name override those below. RANKS=8 for tensor parallelism.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

PYTHON=${PYTHON:-$ROOT/.venv/bin/python} # made by `make setup`
CHECKPOINT_DIR=${CHECKPOINT_DIR:?directory of a torch_dist checkpoint}
TOKENIZER_MODEL=${TOKENIZER_MODEL:?vocabulary of TikTokenizer, JSON}
RANKS=${RANKS:-1}
exec "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$RANKS" \
    "$ROOT/tools/run_inference.py" --load "$CHECKPOINT_DIR" --use-checkpoint-args --model-provider hybrid --bf16 \
    --tensor-model-parallel-size "$RANKS" \
    --tokenizer-type TikTokenizer --tokenizer-model "$TOKENIZER_MODEL" --tiktoken-pattern v2 \
    --no-use-tokenizer-model-from-checkpoint-args \
    --inference-max-seq-length 4096 --enable-chunked-prefill \
    --inference-dynamic-batching-buffer-size-gb 20 \
    --inference-dynamic-batching-prefix-caching --inference-dynamic-batching-prefix-caching-mamba-gb 4 \
    --mamba-inference-ssm-states-dtype fp32 --inference-logging-step-interval 100 \
    --temperature 1.0 --top_k 1 --num-tokens-to-generate 30 "$@"
