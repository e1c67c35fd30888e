"""Megatron-LM's own inference scripts run to their ends, unchanged, with the stand-in of `megatron.training`.

The environment variable `MEGATRON_LM` names a checkout of the version of megatron-core that is found, 0.16 or 0.19;
without it this module is not collected (see conftest.py).
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from megatron_ext.commands import run
from megatron_ext.mcore.upstream_version import found_version
from megatron_ext.megatron_lm.run import main
from tests.unit_tests.megatron_lm.conftest import PROMPTS
from tests.unit_tests.support import megatron_models

ROOT = Path(os.environ["MEGATRON_LM"])
IS_NEW = found_version() >= (0, 17)
BY_HAND, ALL_AT_ONCE = ("--incoming-requests-per-step", "1"), ("--incoming-requests-per-sec", "-1")
SCRIPTS = {
    "examples/inference/gpt/gpt_dynamic_inference.py": BY_HAND,
    "examples/inference/advanced/gpt_dynamic_inference.py": BY_HAND,
    "examples/inference/offline_inference.py": ALL_AT_ONCE,
}
FOUND = [name for name in SCRIPTS if (ROOT / name).exists()]
COMMON = "--num-tokens-to-generate 8 --top_k 1 --return-log-probs --prompts".split()


def tool_results(checkpoint: Path, output: Path) -> dict:
    """Results of this package's own tool on the same weights."""
    prompts = output.with_suffix(".jsonl")
    prompts.write_text("".join(json.dumps({"text": prompt}) + "\n" for prompt in PROMPTS), "utf-8")
    flags = "--use-checkpoint-args --tokenizer-type NullTokenizer --vocab-size 56 --termination-id 55 --top_k 1"
    flags += " --num-tokens-to-generate 8 --return-log-probs --inference-dynamic-batching-buffer-size-gb 0.01"
    files = ["--load", str(checkpoint), "--prompt-file", str(prompts), "--output-path", str(output)]
    assert run.main([*files, *flags.split()]) == run.DONE
    return json.loads(output.read_text("utf-8"))


def test_there_is_a_script_to_play():
    assert FOUND


@pytest.mark.parametrize("kind", ["llama", "hybrid"])
@pytest.mark.parametrize("script", FOUND)
def test_tokens_and_log_probs_are_those_of_our_tool(checkout, checkpoints, tmp_path, script, kind):
    output = tmp_path / "results.json"
    flags = ["--load", str(checkpoints(kind)), "--output-path", str(output), "--vocab-size", "56" if IS_NEW else "55"]
    flags += ["--model-provider", {"llama": "gpt", "hybrid": "mamba"}[kind], *SCRIPTS[script], *COMMON, *PROMPTS]
    with megatron_models.stand_ins():
        assert main([str(ROOT / script), *flags]) == 0
    results, expected = json.loads(output.read_text("utf-8")), tool_results(checkpoints(kind), tmp_path / "tool.json")
    for index in map(str, range(len(PROMPTS))):
        assert results[index]["generated_tokens"] == expected[index]["generated_tokens"]
        close = pytest.approx(expected[index]["logprobs"], abs=megatron_models.ATOL)
        assert results[index]["logprobs"] == close
        assert results[index]["input_prompt"] == PROMPTS[int(index)]
