"""MF-3: Megatron-LM's own configurations of its inference tests start here, as its script would start them.

The environment variable `MEGATRON_CASES` names a folder with its `test_cases`; without it this module is not collected
(see conftest.py). Changed are parallel sizes, paths and the buffer, and the sizes of models: checkpoints are small and
decide over them, and models of random weights get others.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import yaml

from megatron_ext.commands.run import DONE, main
from megatron_ext.config.differences import EMBEDDED_MODEL_DIR
from tests.functional_tests.megatron_rules import problems, run_megatrons_checker
from tests.unit_tests.support.megatron_cases import words_of
from tests.unit_tests.support.vocabularies import write_tiktoken

ROOT = Path(os.environ["MEGATRON_CASES"])
FILES = [
    path
    for path in sorted(ROOT.glob("**/model_config.yaml"))
    if any(word in path.parent.name for word in ("dynamic", "offline"))
]
ONE_RANK = """
--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --expert-model-parallel-size 1
--expert-tensor-parallel-size 1 --inference-dynamic-batching-buffer-size-gb 0.1
""".split()
SMALL = "--hidden-size 128 --ffn-hidden-size 64 --num-attention-heads 4 --kv-channels 16 --vocab-size 4096".split()
GPT = "--model-provider gpt --num-layers 2 --position-embedding-type rope --max-position-embeddings 4096".split()
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32".split()
GPT_OSS = """
--position-embedding-type yarn --rotary-scaling-factor 32 --yarn-original-max-position-embeddings 128
--softmax-type learnable --window-size 127,0 --window-attn-skip-freq 2 --quick-geglu --glu-linear-offset 1
--activation-func-clamp-value 7 --normalization RMSNorm --disable-bias-linear
""".split()
MAMBA = "--mamba-head-dim 16 --mamba-state-dim 16 --mamba-num-groups 1 --mamba-num-heads 8".split()
KINDS = {
    "gpt": GPT,
    "gpt with experts": [*GPT, *EXPERTS],
    "gpt-oss": [*GPT, *EXPERTS, *GPT_OSS],
    "hybrid": ["--hybrid-layer-pattern", "M-M*-", *MAMBA],
    "hybrid with experts": ["--hybrid-layer-pattern", "ME*E", *MAMBA, *EXPERTS],
}
SMALLER = {"--num-query-groups": "2", "--padded-vocab-size": "4096"}


def flags_of(path: Path) -> Mapping[str, object]:
    return yaml.safe_load(path.read_text("utf-8"))["MODEL_ARGS"] or {}


def kind_of(flags: Mapping[str, object]) -> str:
    if "--softmax-type" in flags:
        return "gpt-oss"
    experts = " with experts" if {"--num-experts", "--moe-router-score-function"} & flags.keys() else ""
    return ("gpt" if flags.get("--model-provider", "gpt") == "gpt" else "hybrid") + experts


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict[str, str]:
    """Checkpoints by kind of model, made as they are needed."""
    return {"": str(tmp_path_factory.mktemp("checkpoints"))}


def checkpoint(made: dict[str, str], kind: str) -> str:
    if kind not in made:
        made[kind] = f"{made['']}/{kind}"
        run = ["--prompts", "1", "--tokenizer-type", "NullTokenizer", "--num-tokens-to-generate", "1"]
        assert main([*KINDS[kind], *SMALL, "--bf16", *ONE_RANK[-2:], *run, "--save", made[kind]]) == DONE
    return made[kind]


def merges_of(text: str) -> tuple[str, ...]:
    """Beginnings of all words of a text, so that prompts have as few tokens as with a large vocabulary."""
    words = re.findall(r" ?[A-Za-z][a-z]*", text)
    return tuple(dict.fromkeys(word[:end] for word in words for end in range(2, len(word) + 1)))


def paths(flags: Mapping[str, object], folder: Path) -> list[str]:
    """Flags that replace the file's paths, those of its checkpoint excepted."""
    prompts, vocabulary = folder / "prompts.jsonl", folder / "vocabulary.json"
    fields = {"text": "Artificial intelligence is", "chatgpt_output_token_length": 5}
    prompts.write_text("".join(json.dumps(fields | {"id": number}) + "\n" for number in range(3)))
    is_tiktoken = flags.get("--tokenizer-type") == "TikTokenizer"
    write_tiktoken(vocabulary, merges_of(str(flags.get("--prompts", ""))))
    tokenizer = str(vocabulary if is_tiktoken else EMBEDDED_MODEL_DIR)
    replaced = {"--tokenizer-model": tokenizer, "--prompt-file": str(prompts)}
    given = [word for flag, value in replaced.items() if flag in flags for word in (flag, value)]
    return ["--output-path", str(folder / "out.json"), *given]


def without_checkpoint(flags: Mapping[str, object]) -> list[str]:
    """Flags of a small model of random weights in place of the file's checkpoint."""
    sizes = [*SMALL, "--make-vocab-size-divisible-by", "4096"]
    kind = kind_of(flags)
    if kind.startswith("hybrid"):
        sizes += MAMBA if "--num-layers" in flags or "--hybrid-layer-pattern" in flags else KINDS[kind]
    else:
        sizes += ["--num-layers", "2"]
    if "--num-experts" in flags:
        sizes += EXPERTS
    return ["--load", "", *sizes, *smaller(flags)]


def smaller(flags: Mapping[str, object]) -> list[str]:
    """Sizes in place of those of the file, as far as it has them."""
    return [word for flag, size in SMALLER.items() if flag in flags for word in (flag, size)]


def golden(results: Mapping[str, object]) -> dict[str, object]:
    """Return results as golden values, which say of which tokens they have routing indices."""
    return {
        key: entry | {"routing_indices_token_indices": list(range(len(entry["routing_indices"])))}
        if isinstance(entry, dict) and "routing_indices" in entry
        else entry
        for key, entry in results.items()
    }


@pytest.mark.parametrize("weights", ["loaded", "random"])
@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.parent.relative_to(ROOT)))
def test_it_starts(path: Path, weights: str, made, tmp_path, monkeypatch):
    """Every request completes, and Megatron's checker takes the results with the file's metrics."""
    for name in ("CHECKPOINT_LOAD_PATH", "INFERENCE_OUTPUT_PATH", "DATA_PATH"):
        monkeypatch.setenv(name, str(tmp_path))
    flags = flags_of(path)
    if not flags:  # it describes no run
        model = []
    elif weights == "loaded":
        model = ["--load", checkpoint(made, kind_of(flags)), "--use-checkpoint-args", *smaller(flags)]
    else:
        model = without_checkpoint(flags)
    more = ["--fp8-as-16bit"] if any(flag.startswith("--fp8") for flag in flags) else []
    deterministic = torch.are_deterministic_algorithms_enabled()
    argv = [*words_of(flags), "--ignore-unknown-prompt-fields", *ONE_RANK, *paths(flags, tmp_path), *model, *more]
    assert main(argv) == DONE
    assert torch.are_deterministic_algorithms_enabled() == deterministic
    results = json.loads((tmp_path / "out.json").read_text("utf-8"))
    requests = [entry for key, entry in results.items() if key.isdigit()]
    if flags.get("--throughput-check-only"):
        assert list(results) == ["throughput"]
        return
    assert requests
    assert {entry["status"] for entry in requests} == {"COMPLETED"}
    metrics = yaml.safe_load(path.read_text("utf-8")).get("METRICS") or []
    compared = metrics or ["generated_tokens"]
    assert problems(results, results, compared) == []
    run_megatrons_checker(golden(results), results, metrics)
