"""CU-9: engines behave on a fake CUDA device as on the CPU, and wait for it only in the listed places.

The device is C++ that torch takes for a CUDA device (`support/fake_cuda`); it has to be there before torch is
imported, so its results come from one other process.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.forked import NO_NETWORK, ONE_THREAD
from tests.unit_tests.fake_cuda import lives
from tests.unit_tests.support.fake_cuda import library
from tests.unit_tests.support.source import ROOT

pytestmark = pytest.mark.skipif(library.why_not() is not None, reason=f"no fake device: {library.why_not()}")

LONGEST_RUN = 600.0  # seconds; 30 of CPU time, and ten once to compile the device
TO_HOST = "copy to the host that waits"
SCORED = "log-probs of requests that ask for them"
DRAFTED = "drafts of a layer of multi-token prediction, before the step is planned"
EXPERTS = "how many tokens each expert of an MoE layer has, as upstream's dispatcher asks for it"
WAITS = {
    (TO_HOST, "megatron_ext/runner/step_output.py:_by_request"): "sampled tokens, which the scheduler needs",
    (TO_HOST, "megatron_ext/runner/sampler.py:score_rows"): SCORED,
    (TO_HOST, "megatron_ext/mcore/multi_token_engine.py:_tokens"): DRAFTED,
    ("copy to the device that waits", "megatron_ext/mcore/multi_token_engine.py:_filled"): DRAFTED,
    ("copy from memory that is not pinned", "megatron_ext/mcore/hidden_states.py:_index"): DRAFTED,
    (TO_HOST, "megatron_ext/mcore/layers/moe.py:routed_experts_compute"): EXPERTS,
    ("waits", "megatron_ext/mcore/layers/moe.py:routed_experts_compute"): EXPERTS,
}
"""Everything that a step may wait for: kind and place -> why."""
PROGRAMS = ("programs", "programs of a delta net", "programs with all wishes")
DEVICES = "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"
CAPTURING = "operation not permitted when stream is capturing"
FAULTS = {
    "two devices": DEVICES,
    "new memory": "True",
    "item": "waits: _local_scalar_dense",
    "written in time": "[2, 2, 2, 2]",
    "written early": "PinnedMemoryError: pinned memory was written",
    "read early": "PinnedMemoryError: pinned memory was read",
    "wait while captured": CAPTURING,
    "suspended": "True",
    "one after the other": "True",
    "too large": "--inference-dynamic-batching-block-count 2",
    "too large a step": "not enough memory for temporary tensors of a step of 4096 tokens",
    "profile run": "True",
    "buffer of the default": "--inference-dynamic-batching-buffer-size-gb 6.",
    "engine: index on the host": "index_copy_(): self, index and source expected to be in the same device",
    "engine: wait in a step": "waits: _local_scalar_dense",
    "engine: wait in a program": CAPTURING,
    "engine: places written early": "Error: ",
}


@pytest.fixture(scope="module")
def child(tmp_path_factory):
    """Results of the process with the device; all workers of one run share them."""
    folder = tmp_path_factory.getbasetemp()
    result = folder / "fake_cuda.json"
    with (folder / "fake_cuda.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not result.exists():
            run_child(result)
    return json.loads(result.read_text("utf-8"))


def run_child(result: Path, *names: str, **variables: str) -> None:
    run_pretended("tests.unit_tests.fake_cuda.child", str(result), *names, **variables)


def run_pretended(module: str, *arguments: str, **variables: str) -> None:
    own = {"PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit_tests.support.fake_cuda", "-m", module, *arguments],
        cwd=ROOT,
        env={**os.environ, **ONE_THREAD, **NO_NETWORK, **own, **variables},
        capture_output=True,
        text=True,
        timeout=LONGEST_RUN,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


@pytest.mark.long
@pytest.mark.parametrize("name", lives.LIVES)
def test_a_life_on_the_device_is_that_on_the_host(child, name):
    """CU-9, CU-4: tokens, log-probs, skipped tokens, numbers of steps, errors."""
    assert_same(child["lives"][name], lives.LIVES[name](nullcontext()))


def assert_same(found: dict, expected: dict) -> None:
    for own, other in zip(found["requests"], expected["requests"], strict=True):
        assert other["error"] is None
        assert other["tokens"]
        for part in ("log_probs", "prompt_log_probs"):
            assert own.pop(part) == pytest.approx(other.pop(part), abs=1e-4)
    numbers = {"skipped", "steps", "requests"} & expected.keys()
    assert {one: found[one] for one in numbers} == {one: expected[one] for one in numbers}


@pytest.mark.long
def test_the_lives_have_everything_in_them(child):
    """Hits, log-probs, drafts, graphs: none of it is compared without being there."""
    told = child["lives"]
    assert all(told[name]["skipped"] > 100 for name in ("hybrid", "mamba1", "gated_delta_net", "align", "programs"))
    assert all(sum(one["drafts"] for one in told[name]["requests"]) > 3 for name in ("n-grams", "prediction"))
    assert all(told[name]["replayed"] > 10 for name in (*PROGRAMS, "new weights"))


@pytest.mark.long
def test_steps_wait_for_nothing_else(child):
    """CU-9, CU-4: steps wait only for tokens and log-probs; no entry of the list is stale."""
    found = set()
    for name, one in child["lives"].items():
        waits = {(kind, place) for kind, _, place, _ in one["notes"] if not kind.startswith("asynchronous copy")}
        assert waits <= set(WAITS), name
        assert "experts" in name or EXPERTS not in {WAITS[wait] for wait in waits}
        found |= waits
    assert found == set(WAITS)


@pytest.mark.long
def test_tokens_come_back_once_a_step(child):
    """CU-6: tokens of launched steps return after an event, eager ones included."""
    for name in (*PROGRAMS, "new weights"):
        told = child["lives"][name]
        count = {(kind, place.rpartition(":")[2]): number for kind, _, place, number in told["notes"]}
        fetched = count["asynchronous copy to the host", "fetch"]
        assert fetched > 6
        dropped = int(name == "new weights")  # launched before the weights changed, and computed again
        assert fetched == told["steps"] + dropped
        assert (TO_HOST, "_by_request") not in count
        sent, is_captured = count["asynchronous copy to the device", "send"], name == "programs with all wishes"
        assert (sent == fetched == told["steps"]) if is_captured else sent < fetched, "eager steps are sent otherwise"


@pytest.mark.long
def test_long_prefills_are_launched_ahead(child):
    """CU-6: the step after a prefill is launched before its tokens are read, and no step reads them by waiting.

    Steps whose experts are counted on the host wait in their forwards, so they are not launched ahead.
    """
    for name in ("long prefills", "long prefills of experts"):
        told = child["lives"][name]
        places = {place.rpartition(":")[2] for kind, _, place, _ in told["notes"] if not kind.startswith("asynch")}
        assert places <= ({"routed_experts_compute"} if "experts" in name else set())
        order = [(event, int(number)) for event, number in map(str.split, told["order"])]
        kinds = {number: event for event, number in order if event != "read"}
        assert list(kinds.values()).count("eager") > 3
        assert len(order) == 2 * len(kinds) == 2 * told["steps"]
        after_eager = [number for number, kind in kinds.items() if kinds.get(number - 1) == "eager"]
        ahead = {kinds[one] for one in after_eager if order.index((kinds[one], one)) < order.index(("read", one - 1))}
        assert "captured" in ahead, "the decode after a prompt"
        assert ("eager" in ahead) is ("experts" not in name), "the next chunk of a prompt"


@pytest.mark.long
@pytest.mark.parametrize("name", FAULTS)
def test_detects_errors_that_a_device_would_punish(child, name):
    """CU-9: negative controls of waits, devices and early access, and the memory that pools take and give back."""
    found = child["faults"][name]
    assert FAULTS[name] in found if FAULTS[name] else not found, found


@pytest.mark.long
def test_every_fault_is_looked_at(child):
    assert set(child["faults"]) == set(FAULTS)


@pytest.mark.kernels
@pytest.mark.parametrize("name", lives.KERNEL_LIVES)
def test_a_life_by_kernels(tmp_path, name):
    """CU-9, CU-1: interpreted on the device's memory, asked for and not; in programs as launches of a graph."""
    run_child(tmp_path / "found.json", name, TRITON_INTERPRET="1")
    found = json.loads((tmp_path / "found.json").read_text("utf-8"))["lives"][name]
    assert {"copy_states", "conv_prefill"} <= set(found["kernels"])
    assert "paged_decode_split" in found["kernels"] or name.startswith(("mamba1", "gated_delta_net"))
    assert_same(found, lives.KERNEL_LIVES[name](nullcontext()))


@pytest.mark.kernels
@pytest.mark.parametrize(
    "name", ["runner/cuda_graphs/test_graph_capture.py", "mcore/test_negative_controls.py", "memory", "mixers"]
)
def test_tests_of_a_device_run_there(name):
    """CU-9, CU-8: some tests of `make test-gpu` pass on the simulated device."""
    run_pretended("pytest", "-q", "-p", "no:cacheprovider", f"tests/unit_tests/{name}")
