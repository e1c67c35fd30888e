"""CU-3: what `make kernels` takes for a problem."""

from __future__ import annotations

import importlib.metadata

import pytest
import torch

from megatron_ext.ops import triton
from tools import compile_kernels


@pytest.mark.skipif(not triton.can_be_imported(), reason="triton cannot be imported")
def test_only_known_spills_of_this_triton_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """CU-3: a listed configuration may spill on its device, and has no other problem; all others may not spill."""
    from megatron_ext.ops.triton import aot

    case, shared_bytes = compile_kernels.chosen(quick=True, arch=None)[0], 0
    monkeypatch.setattr(aot, "compile_case", lambda case: aot.Compiled(case, 255, 8, shared_bytes))
    known = {importlib.metadata.version("triton"): frozenset({(case.kernel.name, case.config.name, case.arch)})}
    monkeypatch.setattr(compile_kernels, "KNOWN_SPILLS", known)
    row, problem = compile_kernels.compile_one(0, quick=True, arch=None)
    assert problem is None
    assert getattr(row, "spilled_bytes", None) == 8
    assert "spills 8 bytes" in str(compile_kernels.compile_one(1, quick=True, arch=None)[1])
    shared_bytes = aot.SHARED_BYTES[case.arch] + 1
    assert "shared memory" in str(compile_kernels.compile_one(0, quick=True, arch=None)[1])
    monkeypatch.setattr(compile_kernels, "KNOWN_SPILLS", {"0.0.0": next(iter(known.values()))})
    assert "spills 8 bytes" in str(compile_kernels.compile_one(0, quick=True, arch=None)[1])


@pytest.mark.skipif(not triton.can_be_imported(), reason="triton cannot be imported")
@pytest.mark.parametrize("arch", [86, 100])
def test_devices_whose_launches_would_not_find_the_result_are_left_out(arch, monkeypatch, capsys) -> None:
    monkeypatch.setattr(triton, "is_interpreted", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(triton, "architecture", lambda _: arch)
    monkeypatch.setattr(compile_kernels, "compile_all", None)
    assert compile_kernels.main(["--device"]) == compile_kernels.DONE
    assert f"sm_{arch} is neither" in capsys.readouterr().out
