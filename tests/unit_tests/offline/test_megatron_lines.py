"""MF-3: small lines with every flag of Megatron-LM's inference configurations start, without a checkpoint, too.

`test_real_configurations` plays the files themselves where they are; its flags are listed here once more.
"""

from __future__ import annotations

import itertools
import json
import re
import shlex

import pytest

from megatron_ext.commands.run import DONE, main
from tests.unit_tests.offline import test_megatron_runs
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
# Flags of the configurations: those with tests of their own, and all others.
ELSEWHERE = """
--first-last-layers-bf16 --fp8-format --fp8-param-gather --fp8-recipe --moe-enable-routing-replay
--activation-func-clamp-value --glu-linear-offset --mscale --mscale-all-dim --no-yarn-correction-range-round-to-int
--quick-geglu --rotary-scaling-factor --softmax-type --window-attn-skip-freq --window-size --yarn-beta-fast
--yarn-beta-slow --yarn-original-max-position-embeddings
""".split()
FOUND = """
--async-mode --attention-backend --attention-dropout --auto-detect-ckpt-format --bf16 --ckpt-assume-constant-structure
--ckpt-format --ckpt-fully-parallel-load --ckpt-fully-parallel-save --cuda-graph-impl --cuda-graph-scope
--decode-only-cuda-graphs --deterministic-mode --disable-bias-linear --disable-chunked-prefill --dist-ckpt-strictness
--distributed-backend --enable-chunked-prefill --enable-cuda-graph --expert-model-parallel-size
--expert-tensor-parallel-size --ffn-hidden-size --group-query-attention --hidden-dropout --hidden-size
--hybrid-layer-pattern --hybrid-override-pattern --incoming-requests-per-sec --incoming-requests-per-step
--inference-ckpt-non-strict --inference-cuda-graph-scope --inference-fuse-tp-communication
--inference-logging-step-interval --inference-max-seq-length --inference-moe-token-dispatcher-type
--inference-repeat-n --inference-rng-tracker --init-method-std --is-hybrid-model --kv-channels --load --log-interval
--log-memory-to-tensorboard --log-num-zeros-in-grad --log-timers-to-tensorboard --log-validation-ppl-to-tensorboard
--make-vocab-size-divisible-by --mamba-inference-conv-states-dtype --mamba-inference-ssm-states-dtype
--max-position-embeddings --max-tokens-to-oom --micro-batch-size --model-provider --moe-aux-loss-coeff
--moe-ffn-hidden-size --moe-grouped-gemm --moe-pad-experts-for-cuda-graph-inference --moe-router-dtype
--moe-router-enable-expert-bias --moe-router-load-balancing-type --moe-router-score-function --moe-router-topk
--moe-router-topk-scaling-factor --moe-shared-expert-intermediate-size --moe-token-dispatcher-type --moe-z-loss-coeff
--no-create-attention-mask-in-dataloader --no-load-optim --no-masked-softmax-fusion --no-record-throughput
--no-rl-persist-cuda-graphs --no-rope-fusion --no-use-tokenizer-model-from-checkpoint-args --normalization
--num-attention-heads --num-experts --num-layers --num-query-groups --num-tokens-from-file --num-tokens-to-generate
--num-workers --output-every-n-results --output-path --padded-vocab-size --pipeline-model-parallel-size
--position-embedding-type --prompt-file --prompt-file-num-truncate --prompts --return-log-probs
--rl-kv-cache-management-mode --rotary-base --rotary-percent --save-interval --seed --seq-length --sequence-parallel
--spec --stop-words --suspend-resume-interval --suspend-timeout --swiglu --te-rng-tracker --temperature
--tensor-model-parallel-size --termination-id --throughput-check-only --tiktoken-pattern --timing-log-level
--tokenizer-model --tokenizer-type --top-n-logprobs --top_k --top_p --transformer-impl
--untie-embeddings-and-output-weights --use-checkpoint-args --use-coordinator --use-flashinfer-fused-rope
--use-mcore-models ...async-sched-mode ...buffer-guaranteed-fraction ...buffer-overflow-factor ...buffer-size-gb
...cuda-graph-max-tokens ...max-requests ...max-requests-override ...max-tokens ...num-cuda-graphs ...prefix-caching
...prefix-caching-coordinator-policy ...prefix-caching-eviction-policy ...sampling-backend ...unified-memory-level
""".replace("...", f"{BATCHING}-").split()


def words_of(line: str, places: dict[str, str]) -> list[str]:
    """Split a line as a shell does, with paths in place of their names."""
    return [places.get(word, word) for word in shlex.split(line)]


@pytest.mark.parametrize("name", LINES)
def test_it_starts(name, tmp_path):
    """A line starts as typed, and as Megatron's YAML file."""
    places = {place: str(tmp_path / place) for place in ("VOCABULARY.json", "OUTPUT", "PROMPTS")}
    write_tiktoken(tmp_path / "VOCABULARY.json")
    fields = {"text": "Time travel", "chatgpt_output_token_length": 3, "id": 7}
    (tmp_path / "PROMPTS").write_text("".join(json.dumps(fields) + "\n" for _ in range(3)), "utf-8")
    words = words_of(COMMON + LINES[name], places)
    path = tmp_path / "model_config.yaml"
    path.write_text(yaml_of(words), "utf-8")
    for argv in (words, ["--model-config", str(path)]):
        (tmp_path / "OUTPUT").unlink(missing_ok=True)
        assert main(argv) == DONE
        results = json.loads((tmp_path / "OUTPUT").read_text("utf-8"))
        if name == "a throughput test":
            assert list(results) == ["throughput"]
        else:
            assert results["0"]["status"] == "COMPLETED"
            assert len(results["0"]["generated_tokens"]) == 4


def yaml_of(words: list[str]) -> str:
    """Write a line as a file of Megatron's."""
    lines = ["MODE: inference", "MODEL_ARGS:"]
    for index, word in enumerate(words):
        if word.startswith("--"):
            values = list(itertools.takewhile(lambda value: not value.startswith("--"), words[index + 1 :]))
            lines.append(f"  {word}: {json.dumps(' '.join(values)) if values else 'true'}")
    return "\n".join(lines) + "\n"


def test_every_flag_of_the_configurations_is_in_a_line():
    """Flags of 8 bits, of routing replay and of gpt-oss have tests of their own."""
    runs = [getattr(test_megatron_runs, name) for name in ("ALL", "RUN_A", "RUN_B")]
    covered = set(re.findall(r"--[a-z][\w-]*", " ".join([COMMON, *LINES.values(), *runs])))
    assert sorted(set(FOUND) - covered) == []
    assert not covered & set(ELSEWHERE)
