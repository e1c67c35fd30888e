"""TE-4: waiting of OpenMP's threads in processes that the tools start; a user's variables override it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from megatron_ext.console.start import OPENMP_WAIT_VARIABLES, limit_spinning
from tests.unit_tests.support.source import ROOT


def spin_count(*command: str, **variables: str) -> int:
    """Value that OpenMP has read in a tool, which says so when torch is imported and is ended then."""
    kept = {name: value for name, value in os.environ.items() if name not in OPENMP_WAIT_VARIABLES}
    environment = kept | {"OMP_DISPLAY_ENV": "VERBOSE"} | variables
    whole = [sys.executable, *command]
    with subprocess.Popen(whole, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True) as process:
        said = ""
        for line in process.stderr:
            said += line
            found = re.search(r"GOMP_SPINCOUNT = '(\d+)'", line)
            if found:
                process.kill()
                return int(found[1])
    raise AssertionError(said)


class TestTools:
    @pytest.mark.parametrize("tool", ["tools/run_inference.py", "tools/run_server.py"])
    def test_threads_hardly_spin_by_default(self, tool):
        """OpenMP's own default is 300,000."""
        assert spin_count(tool) == 1000


class TestVariables:
    @pytest.fixture(params=[{}, {"torch": None}], ids=["before torch", "after torch"])
    def modules(self, request, monkeypatch) -> dict[str, object]:
        """Imported modules, for the tested module alone: other threads may import torch meanwhile."""
        monkeypatch.setattr("megatron_ext.console.start.sys", SimpleNamespace(modules=request.param))
        return request.param

    def left_by(self, environment: dict[str, str], monkeypatch) -> dict[str, str]:
        monkeypatch.setattr("megatron_ext.console.start.os", SimpleNamespace(environ=environment))
        limit_spinning()
        return environment

    @pytest.mark.parametrize("name", OPENMP_WAIT_VARIABLES)
    def test_each_of_them_decides(self, monkeypatch, modules, name):
        assert self.left_by({name: "1"}, monkeypatch) == {name: "1"}

    def test_none_is_set(self, monkeypatch, modules):
        added = {} if modules else {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000"}
        assert self.left_by({"OMP_NUM_THREADS": "4"}, monkeypatch) == {"OMP_NUM_THREADS": "4"} | added
