"""Pytest plugin that selects the tests of a CUDA device: with a device only these run.

Tests of folders that compute nothing, or nothing but files, are those of any machine (`make test`). The others compute
on the device that there is. Which of them cannot was found on a fake device (`support/fake_cuda`); each has
its reason. `TEST_EVERYTHING=1` runs all the same.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

VARIABLE = "TEST_EVERYTHING"
ROOT = Path(__file__).parents[1]
FOLDERS = tuple(f"tests/unit_tests/{name}/" for name in ("engine", "mcore", "memory", "mixers", "ops", "runner"))
"""That compute on the device."""
MODEL = "its model is on the host, where megatron-core does not compute beside a device"
BATCH = "a device's products are rounded by what else is in the batch, and so are bf16's near ties"
CPU = "it is about the host"
HOST = {
    "mcore/layers/test_residual_layers.py": MODEL,
    "mcore/layers/test_grouped_moe.py": MODEL,
    "mcore/layers/test_moe.py": MODEL,
    "mcore/layers/test_transformer_engine.py": MODEL,
    "runner/test_structured_output.py::test_the_same_request_in_any_batch": BATCH,
    "runner/test_structured_output.py::test_with_drafts": BATCH,
    "mcore/test_prefills_per_step.py": "it changes the defaults of CPUs",
    "runner/cuda_graphs/test_captured_steps.py::test_a_step_is_sent_in_one_copy": "a device has a copy more",
    "mcore/test_memory_at_start.py": CPU,
    "mcore/parallel_state/test_gloo.py": CPU,
    "mcore/test_platform.py": CPU,
    "memory/test_heap.py": CPU,
    "ops/test_cpp_build.py": CPU,
    "ops/test_cpp_library.py": CPU,
    "ops/test_linear.py": CPU,
    "ops/test_paged_attention_cpp.py": CPU,
}
"""By file, or file and function, below tests/unit_tests: why not on a device."""
_LEFT_OUT = pytest.StashKey[int]()


def why_not(item: pytest.Item) -> str | None:
    """Why a test is not for a device; None if it is."""
    name = item.path.relative_to(ROOT).as_posix()
    if not name.startswith(FOLDERS):
        return "nothing of it is computed on a device"
    if item.get_closest_marker("worlds"):
        return "several ranks need a device each"
    short = name.removeprefix("tests/unit_tests/")
    return HOST.get(short) or HOST.get(f"{short}::{getattr(item, 'originalname', item.name)}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available() or os.environ.get(VARIABLE):
        return
    left_out = [item for item in items if why_not(item) is not None]
    if left_out:
        config.stash[_LEFT_OUT] = len(left_out)
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if why_not(item) is None]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    count = config.stash.get(_LEFT_OUT, 0)
    if count:
        terminalreporter.write_line(
            f"{count} tests say nothing of a device, or cannot (tests/on_device.py); {VARIABLE}=1 runs them, too"
        )
