"""Rules of Megatron-LM's checker of golden values, written anew: what it accepts as the results of a run.

Its own file, if the environment variable `MEGATRON_CHECKER` names it, is run beside these rules.
"""

from __future__ import annotations

import json
import math
import os
import runpy
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

CHECKER_VARIABLE = "MEGATRON_CHECKER"
TOLERANCE = 1e-3  # absolute, of log-probs
# Top-level keys that are not requests.
RUN_KEYS = {
    "throughput",
    "mem-max-allocated-bytes",
    "lifetime_prefill_token_count",
    "async_sched_step_count",
    "async_sched_compaction_step_count",
}
_COUNT, _NUMBER, _NULL = (int,), (int, float), (type(None),)
_TYPES: dict[str, tuple[type, ...]] = {
    "input_prompt": (str,),
    "generated_text": (str,),
    "generated_tokens": (list,),
    "latency": _NUMBER,
    "ttft": (*_NUMBER, *_NULL),
    "step_count": _COUNT,
    "cuda_graph_request_count_map": (dict, *_NULL),
    "top_n_logprobs": (list, *_NULL),
    "prompt_top_n_logprobs": (list, *_NULL),
}
_LOG_PROBS = ("prompt_logprobs", "generated_logprobs", "logprobs")
_RUN_TYPES: dict[str, tuple[type, ...]] = dict.fromkeys(RUN_KEYS - {"throughput"}, _COUNT) | {"throughput": (list,)}


def problems(golden: dict[str, Any], current: dict[str, Any], metrics: Sequence[str]) -> list[str]:
    """Problems that Megatron's checker finds in results, and types that are not those of Megatron's scripts.

    Args:
        golden: Golden values, with as many of the top-level keys as wanted.
        current: Results of a run.
        metrics: What is compared: `generated_tokens` (exact), `generated_text` (to the shorter length), `logprobs`.
    """
    ids = set(golden) - RUN_KEYS
    found = [f"unexpected {key}" for key in sorted(set(current) - RUN_KEYS - ids)]
    found += [
        f"{key} is {current[key]!r}"
        for key in sorted(RUN_KEYS & set(current))
        if not _is(current[key], _RUN_TYPES[key])
    ]
    for key in sorted(ids & set(current)):
        entry = current[key]
        found += [
            f"{name} of {key}" for name, types in _TYPES.items() if name not in entry or not _is(entry[name], types)
        ]
        if "generated_logprobs" in entry:
            found += [f"{name} of {key}" for name in _LOG_PROBS if not _is(entry.get(name), (list,))]
        compared = [compare for name, compare in _COMPARED.items() if name in metrics and name in golden[key]]
        found += [f"nothing compared of {key}"] if not compared else []
        found += [problem + f" of {key}" for compare in compared for problem in compare(golden[key], entry)]
    return found


def _is(value: object, types: tuple[type, ...]) -> bool:
    return isinstance(value, types) and not isinstance(value, bool)


def _tokens(golden: dict[str, Any], current: dict[str, Any]) -> list[str]:
    return [] if golden["generated_tokens"] == current["generated_tokens"] else ["tokens"]


def _text(golden: dict[str, Any], current: dict[str, Any]) -> list[str]:
    one, other = golden["generated_text"], current["generated_text"]
    length = min(len(one), len(other))
    return [] if length and one[:length] == other[:length] else ["text"]


def _log_probs(golden: dict[str, Any], current: dict[str, Any]) -> list[str]:
    one, other = golden["logprobs"], current["logprobs"]
    if len(one) != len(other):
        return ["number of log-probs"]
    close = (math.isclose(a, b, abs_tol=TOLERANCE) for a, b in zip(one, other, strict=True))
    return [] if all(close) else ["log-probs"]


_COMPARED: dict[str, Callable[[dict[str, Any], dict[str, Any]], list[str]]] = {
    "generated_tokens": _tokens,
    "generated_text": _text,
    "logprobs": _log_probs,
}
COMPARED = tuple(_COMPARED)


def run_megatrons_checker(golden: dict[str, Any], current: dict[str, Any], metrics: Sequence[str] | Path) -> None:
    """Run Megatron's own checker, if `MEGATRON_CHECKER` names its file or the folder with it; else do nothing.

    Args:
        golden: Golden values.
        current: Results of a run.
        metrics: As in `problems`, or a case's YAML file, of which it reads `METRICS`.

    Raises:
        AssertionError: It found a difference.
        FileNotFoundError: The variable names no checker.
    """
    if CHECKER_VARIABLE not in os.environ:
        return
    path = Path(os.environ[CHECKER_VARIABLE])
    path = path / "test_inference_regular_pipeline.py" if path.is_dir() else path
    if isinstance(metrics, Path):
        config = metrics.read_text(encoding="utf-8")
    else:
        config = yaml.safe_dump({"METRICS": list(metrics)})
    texts = json.dumps(golden), json.dumps(current), config
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("golden.json", "current.json", "model_config.yaml")]
        for file, text in zip(files, texts, strict=True):
            file.write_text(text, encoding="utf-8")
        runpy.run_path(str(path))["test_inference_pipeline"](*map(str, files))
