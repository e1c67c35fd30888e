"""MR-1, MR-3, MR-7: the command `run` on several ranks writes what it writes on one."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from megatron_ext.models.build import build_model
from megatron_ext.models.megatron.dist_checkpoint import save_dist_checkpoint
from tests.unit_tests.parallel.test_failures import exit_codes, run_tool
from tests.unit_tests.support.driver import make_prompt
from tests.unit_tests.support.models import CONFIGS
from tests.unit_tests.support.ranks import run_world

pytestmark = pytest.mark.worlds

SIZES = [
    *("--inference-dynamic-batching-block-size", "16", "--inference-dynamic-batching-block-count", "24"),
    *("--inference-dynamic-batching-prefix-caching-mamba-slots", "4", "--inference-dynamic-batching-max-requests", "3"),
]
PROMPT = (
    "class Stack:\n    def push(self, value):\n        self.values.append(value)\n\n"
    "    def pop(self):\n        return self.values.pop()\n"
)
LINES = [
    {"text": PROMPT, "num_tokens_to_generate": 12},
    {"text": PROMPT + "    middle", "num_tokens_to_generate": 9, "return_log_probs": True},
    {"text": PROMPT + "# sampled", "num_tokens_to_generate": 9, "temperature": 0.8, "seed": 3},
    {"text": "another one", "num_tokens_to_generate": 30, "stop_words": ["e"]},
    {
        "text": PROMPT,
        "num_tokens_to_generate": 12,
        "repetition_penalty": 1.5,
        "min_p": 0.1,
        "temperature": 1,
        "seed": 1,
    },
    {"text": PROMPT, "num_tokens_to_generate": 9, "response_format": {"type": "regex", "regex": "[a-z]{3} [0-9]+"}},
    {"text": PROMPT + "# scored", "num_tokens_to_generate": 0, "return_log_probs": True},
    {"text": PROMPT * 20, "num_tokens_to_generate": 5},
]
# The steps of a pass are more where the mask of the grammar is late: its request is left out of a step (SE-10).
PER_RUN = {"latency", "ttft", "throughput", "mem-max-allocated-bytes", "geometry", "step_count"}
LAYOUTS = {
    "TP 2": ["--tensor-model-parallel-size", "2"],
    "PP 2": ["--pipeline-model-parallel-size", "2"],
}


def run(tmp_path: Path, size: int, flags: Sequence[str], lines: Sequence[dict] = LINES) -> tuple[dict, list[str]]:
    """The JSON, and what the ranks have on standard output."""
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / f"out{size}.json"
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    files = ["--prompt-file", str(prompts), "--output-path", str(output), "--output-format", "full"]
    outcomes = run_world(run_tool, size, [*files, *SIZES, *flags], 0, "nothing")
    assert set(exit_codes(outcomes)) <= {0, 1}, [one.describe() for one in outcomes]
    return json.loads(output.read_text()), [one.stdout for one in outcomes]


def near(value: float) -> object:
    """Return what equals floats within 1e-3; rounded ones may differ however close they are."""
    return pytest.approx(value, rel=0, abs=1e-3)


def strip(value: object, read_float: Callable[[float], object] = float) -> object:
    """Remove everything that differs between any two runs."""
    if isinstance(value, dict):
        return {key: strip(one, read_float) for key, one in value.items() if key not in PER_RUN}
    if isinstance(value, list):
        return [strip(one, read_float) for one in value]
    return read_float(value) if isinstance(value, float) else value


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_results(tmp_path: Path, layout: str):
    """Tokens, texts, scores, counts; twice the same prompts, so that the second pass hits."""
    flags = ["--inference-repeat-n", "2", "--inference-logging-step-interval", "5"]
    alone, _ = run(tmp_path, 1, flags)
    together, texts = run(tmp_path, 2, [*flags, *LAYOUTS[layout], "--check-ranks"])
    assert strip(together) == strip(alone, near)
    assert alone["prefix_cache"]["hits"] >= 3
    assert "ranks" not in alone["geometry"]
    assert [one["rank"] for one in together["geometry"]["ranks"]] == [0, 1]
    assert sum(one["block_bytes"] for one in together["geometry"]["ranks"]) == together["geometry"]["block_bytes"]
    assert "rank 1" in texts[0]
    assert texts[1] == ""


def test_routing_indices(tmp_path: Path):
    """MF-1: the experts of every token are in the JSON, whichever replica computed the request."""
    model = tmp_path / "model"
    save_dist_checkpoint(model, build_model(CONFIGS["experts"], device=torch.device("cpu")), CONFIGS["experts"])
    prompt = " ".join(map(str, make_prompt(40)))
    lines = [{"text": f"{prompt} {last}", "num_tokens_to_generate": 5} for last in range(4)]
    flags = ["--load", str(model), "--tokenizer-type", "NullTokenizer", "--moe-enable-routing-replay"]
    alone, _ = run(tmp_path, 1, flags, lines)
    together, _ = run(tmp_path, 2, [*flags, "--expert-model-parallel-size", "2"], lines)
    one, other = ([found[str(index)]["routing_indices"] for index in range(len(lines))] for found in (alone, together))
    assert [len(rows) for rows in one] == [45] * len(lines)
    assert one == other
    assert one[0] != one[1]
