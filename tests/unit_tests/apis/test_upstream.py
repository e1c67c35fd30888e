"""MF-11: MegatronLLM beside megatron-core 0.19.2's own: one program with both, and the signatures of both.

as_upstream.py runs in a process of its own with 0.19.2 on the path, fetched by hash (tools/bases.py), and with
stand-ins for flash-attention and CUDA.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.base import found_core
from tests.unit_tests.apis.as_upstream import FIELDS, OURS, TOP_N, UPSTREAM
from tests.unit_tests.support.source import ROOT
from tools import bases

VERSION = "0.19.2"
# It is long beside another version, since all of this process's imports are made once more; `.ci/run` has both.
pytestmark = [] if found_core()[0] == VERSION else [pytest.mark.long]
DEADLINE = 300  # seconds, for a loaded machine
SCORES = ("prompt_log_probs", "generated_log_probs")
# What main has, or this package in addition, beyond 0.19.2.
ADDED = {
    "MegatronLLM": {"serve", "submit", "run_sync"},
    "MegatronAsyncLLM": {"submit", "run_sync"},
    "ServeConfig": {"server_config"},
}
ADDED_PARAMETERS = {"inference_wrapper_cls", "multi_modal_data", "sock"}


@pytest.fixture(scope="module")
def found() -> dict:
    """Output of as_upstream.py."""
    try:
        packages = bases.fetch(VERSION)
    except ValueError as error:
        if "DO NOT MATCH" in str(error):
            raise
        pytest.skip(f"MegatronLLM is not compared with {VERSION}'s, whose wheel cannot be fetched: {error}")
    path = os.pathsep.join([str(packages), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit_tests.apis.as_upstream"],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def requests(found) -> list[tuple[dict, dict]]:
    """Requests of the program, upstream's and ours."""
    return list(zip(*(found["results"][module]["requests"] for module in (UPSTREAM, OURS)), strict=True))


class TestOneProgram:
    """The import is the only line of the program that differs."""

    def test_it_asks_for_something(self, requests):
        assert len(requests) == 9
        assert sum(len(theirs["generated_tokens"]) for theirs, _ in requests) > 60

    @pytest.mark.parametrize("name", [*(name for name in FIELDS if name not in SCORES), "status", "params", "text"])
    def test_values(self, requests, name):
        assert [ours[name] for _, ours in requests] == [theirs[name] for theirs, _ in requests]

    @pytest.mark.parametrize("name", SCORES)
    def test_scores(self, requests, name):
        for theirs, ours in requests:
            assert (ours[name] is None) == (theirs[name] is None)
            assert ours[name] is None or ours[name] == pytest.approx(theirs[name], abs=1e-4)

    @pytest.mark.parametrize("name", TOP_N)
    def test_alternatives(self, requests, name):
        for theirs, ours in requests:
            assert (ours[name] is None) == (theirs[name] is None)
            for one, other in zip(ours[name] or (), theirs[name] or (), strict=True):
                assert one == pytest.approx(other, abs=1e-4)

    def test_fields_and_types(self, requests):
        """Fields are the same; a value of the same type, or one where upstream has none."""
        for theirs, ours in requests:
            assert ours["fields"] == theirs["fields"]
            assert ours["types"].keys() == theirs["types"].keys()
            differing = {name for name, kind in theirs["types"].items() if ours["types"][name] != kind}
            assert {theirs["types"][name] for name in differing} <= {"NoneType"}

    @pytest.mark.parametrize("name", ["errors", "limits"])
    def test_misuse_and_limits(self, found, name):
        assert found["results"][OURS][name] == found["results"][UPSTREAM][name]
        assert found["results"][OURS][name]


class TestSignatures:
    @pytest.mark.parametrize("name", ADDED)
    def test_methods(self, found, name):
        theirs, ours = (found["signatures"][module][name] for module in (UPSTREAM, OURS))
        assert ours.keys() - theirs.keys() == ADDED[name]
        for method, signature in theirs.items():
            shared = [one for one in ours[method] if not isinstance(one, list) or one[0] not in ADDED_PARAMETERS]
            assert (shared if isinstance(signature, list) else ours[method]) == signature, method

    def test_exported_names(self, found):
        assert found["signatures"][OURS]["names"] == found["signatures"][UPSTREAM]["names"]
