"""MF-3: small lines with the flags of Megatron-LM's inference configurations start, without a checkpoint, too.

`test_real_configurations` plays the files themselves where they are.
"""

from __future__ import annotations

import json
import shlex

import pytest

from megatron_ext.commands.run import DONE, main
from tests.unit_tests.support.vocabularies import write_tiktoken

BATCHING = "--inference-dynamic-batching"
COMMON = f"""
--tokenizer-type TikTokenizer --tokenizer-model VOCABULARY.json --tiktoken-pattern v2 --bf16 --seed 42 --temperature 1.0
--output-path OUTPUT --use-mcore-models --te-rng-tracker --inference-rng-tracker --no-rope-fusion
--no-masked-softmax-fusion --sequence-parallel --inference-fuse-tp-communication {BATCHING}-buffer-size-gb 0.05
--hidden-size 64 --ffn-hidden-size 64 --num-attention-heads 4 --make-vocab-size-divisible-by 128
--padded-vocab-size 1280 --swiglu --normalization RMSNorm --disable-bias-linear
"""
LINES = {
    "GPT with CUDA graphs": f"""
--num-layers 2 --max-position-embeddings 1024 --position-embedding-type rope --rotary-percent 1.0 --rotary-base 1000000
--group-query-attention --num-query-groups 2 --cuda-graph-impl local --inference-cuda-graph-scope block
--cuda-graph-scope full --enable-cuda-graph --decode-only-cuda-graphs {BATCHING}-num-cuda-graphs 2
{BATCHING}-cuda-graph-max-tokens 2048 {BATCHING}-max-requests-override 8 {BATCHING}-buffer-guaranteed-fraction 0.05
{BATCHING}-buffer-overflow-factor 1.2 {BATCHING}-unified-memory-level 0 --use-flashinfer-fused-rope
{BATCHING}-sampling-backend flashinfer --top_p 0.9 --return-log-probs --top-n-logprobs 2 --termination-id -1
--num-tokens-to-generate 4 --prompts "Time travel to 2008" --stop-words '"the"'
""",
    "a throughput test": f"""
--num-layers 2 --use-rotary-position-embeddings --top_k 1 --incoming-requests-per-step 32 --use-coordinator
--prompt-file PROMPTS --prompt-file-num-truncate 2 --num-tokens-from-file --output-every-n-results 32
--throughput-check-only --disable-chunked-prefill --ignore-unknown-prompt-fields --suspend-resume-interval 16
--suspend-timeout 4.0 --rl-kv-cache-management-mode recompute --no-rl-persist-cuda-graphs --async-mode
{BATCHING}-prefix-caching {BATCHING}-prefix-caching-eviction-policy lru
{BATCHING}-prefix-caching-coordinator-policy longest_prefix {BATCHING}-async-sched-mode async
""",
    "a hybrid with experts": f"""
--is-hybrid-model --hybrid-override-pattern ME*E --position-embedding-type none --mamba-head-dim 16 --mamba-state-dim 16
--mamba-num-groups 1 --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-router-score-function sigmoid
--moe-router-enable-expert-bias --moe-router-topk-scaling-factor 2.5 --moe-router-dtype fp32
--moe-shared-expert-intermediate-size 32 --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4
--moe-z-loss-coeff 1e-3 --moe-grouped-gemm --moe-token-dispatcher-type alltoall
--inference-moe-token-dispatcher-type nvls --moe-pad-experts-for-cuda-graph-inference --expert-tensor-parallel-size 1
--enable-chunked-prefill {BATCHING}-max-tokens 64 --top_k 1 --num-tokens-to-generate 4 --prompts "Time travel"
""",
}


def words_of(line: str, places: dict[str, str]) -> list[str]:
    """Split a line as a shell does, with paths in place of their names."""
    return [places.get(word, word) for word in shlex.split(line)]


@pytest.mark.parametrize("name", LINES)
def test_it_starts(name, tmp_path):
    places = {place: str(tmp_path / place) for place in ("VOCABULARY.json", "OUTPUT", "PROMPTS")}
    write_tiktoken(tmp_path / "VOCABULARY.json")
    fields = {"text": "Time travel", "chatgpt_output_token_length": 3, "id": 7}
    (tmp_path / "PROMPTS").write_text("".join(json.dumps(fields) + "\n" for _ in range(3)), "utf-8")
    words = words_of(COMMON + LINES[name], places)
    assert main(words) == DONE
    results = json.loads((tmp_path / "OUTPUT").read_text("utf-8"))
    if name == "a throughput test":
        assert list(results) == ["throughput"]
    else:
        assert results["0"]["status"] == "COMPLETED"
        assert len(results["0"]["generated_tokens"]) == 4
