"""CU-3: what `make kernels` reads from compiled code: precision of products, copies that overlap them, warp groups."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ext.ops import triton
from tests.unit_tests.support.source import ROOT

SCRIPT = """
import dataclasses, json
import triton
import triton.language as tl
from megatron_ext.ops.triton import aot
from megatron_ext.ops.triton.kernel_registry import config, kernel

def configured(stages, exact, dtype):
    return config(num_stages=stages, only=(dtype,), M=64, FULL_FP32=int(exact))

OVERLAPPED, SERIAL = configured(3, True, "bf16"), configured(2, True, "bf16")
EXACT, ROUNDED = configured(3, True, "fp32"), configured(3, False, "fp32")

@kernel(
    pointers={"T": "x y", "fp32": "out"}, counts="n", types=[{"T": "bf16"}, {"T": "fp32"}],
    configs=[OVERLAPPED, SERIAL, EXACT, ROUNDED],
)
def sums(x, y, out, row, n, M: tl.constexpr, FULL_FP32: tl.constexpr):
    i = tl.arange(0, M)
    total = tl.zeros([M, M], tl.float32)
    for start in range(0, n, M):
        a = tl.load(x + i[:, None] * row + start + i[None, :])
        b = tl.load(y + (start + i[:, None]) * row + i[None, :])
        total = tl.dot(a, b, total, input_precision="ieee" if FULL_FP32 else "tf32")
    tl.store(out + i[:, None] * row + i[None, :], total)

found = {}
for name, config in {"overlapped": OVERLAPPED, "serial": SERIAL, "exact": EXACT, "rounded": ROUNDED}.items():
    made = aot.compile_case(aot.Case(sums, config, {"T": config.only[0]}, aot.ALIGNED, 90))
    found[name] = [made.overlaps, sorted(made.precisions), made.problem]
print(json.dumps(found))
"""


def found_by(script: str, folder: Path) -> dict[str, object]:
    """Return what a script prints that compiles kernels, in a process that does not interpret them.

    Args:
        script: Python; a file, since Triton reads the source of kernels.
        folder: Folder for the script and for Triton's cache.
    """
    environment = {**os.environ, "TRITON_CACHE_DIR": str(folder), "PYTHONPATH": str(ROOT)}
    environment.pop(triton.INTERPRET, None)
    path = folder / "script.py"
    path.write_text(script)
    command = [sys.executable, str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=300)
    return json.loads(done.stdout)


@pytest.mark.long
@pytest.mark.skipif(not triton.can_be_imported(), reason="triton cannot be imported")
def test_mistakes_in_compiled_code_are_found(tmp_path: Path) -> None:
    """Copies that are waited for at once, and fp32 products that are rounded, beside kernels without these mistakes."""
    assert found_by(SCRIPT, tmp_path) == {
        "overlapped": [True, [], None],
        "serial": [False, [], "waits for copies that no product overlaps"],
        "exact": [True, ["ieee"], None],
        "rounded": [True, ["tf32"], "rounds fp32 inputs of a product to tf32"],
    }


TILES = """
import json
from megatron_ext.ops.paged_attention import kernels
from megatron_ext.ops.triton import aot

found = {}
for size in (128, 256):
    tiles = {"chosen": kernels.many(kernels.NARROW, size, 90), "of others": kernels.many(kernels.NARROW, size, 80)}
    for name, config in tiles.items():
        made = aot.compile_case(aot.Case(kernels.paged_prefill, config, {"T": "bf16"}, aot.ALIGNED, 90))
        found[f"{name}, {size}"] = [config["M"], made.uses_warp_groups, made.overlaps, made.problem]
print(json.dumps(found))
"""


@pytest.mark.long
@pytest.mark.skipif(not triton.can_be_imported(), reason="triton cannot be imported")
def test_large_heads_are_multiplied_by_warp_groups(tmp_path: Path) -> None:
    """CU-25: prefills with heads of 128 and 256 channels; the tile that sm_80 has for 256 is found to be too small."""
    assert found_by(TILES, tmp_path) == {
        "chosen, 128": [128, True, True, None],
        "of others, 128": [64, True, True, None],
        "chosen, 256": [64, True, True, None],
        "of others, 256": [32, False, True, "computes 16-bit products without warp groups"],
    }


# A launch on a pretended device, which is stopped where Triton would compile.
KEYS = """
import json
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import compiler
from triton.runtime import driver
from megatron_ext.ops.triton import aot
from megatron_ext.ops.triton.kernel_registry import TYPE_NAMES, all_kernels

TARGET = GPUTarget("cuda", 90, 32)
compiled = []

class Device:
    get_current_target = lambda self: TARGET
    get_current_device = get_current_stream = lambda self, *_: 0

def noted(source, target=None, options=None, **_):
    made = compiler.make_backend(TARGET).parse_options(dict(options if isinstance(options, dict) else vars(options)))
    compiled.append(source.hash() + made.hash())
    raise RuntimeError("compiled nothing")

def attempt(call, /, *arguments, **more):
    try:
        call(*arguments, **more)
    except (RuntimeError, aot.CompileFailure):
        pass

driver.set_active(Device())
triton.compile = triton.compiler.compile = compiler.compile = noted
types = {name: dtype for dtype, name in TYPE_NAMES.items()}
differing = []
for case in aot.cases(all_kernels(), quick=True):
    kernel = case.kernel
    tensors = {name: torch.zeros(64, dtype=types[case.types.get(of, of)]) for name, of in kernel.pointers.items()}
    numbers = dict.fromkeys(kernel.strides, 32) | dict.fromkeys(kernel.counts, 7) | dict.fromkeys(kernel.scalars, 0.5)
    given = tensors | numbers | dict(case.config.constants)
    attempt(aot.compile_case, case)
    attempt(kernel.function.run, grid=(1,), warmup=True, **given, **case.config.options)
    if len(set(compiled)) != 1 or len(compiled) != 2:
        differing.append(kernel.name)
    compiled.clear()
print(json.dumps({"differing": differing}))
"""


@pytest.mark.skipif(not triton.can_be_imported(), reason="triton cannot be imported")
def test_launches_find_compiled_cases_in_the_cache(tmp_path: Path) -> None:
    """CU-3: a case has the signature and options of a launch, so that it is what a device computes."""
    assert found_by(KEYS, tmp_path) == {"differing": []}


SPILLS = """
import dataclasses, json
from megatron_ext.ops.paged_attention import kernels
from megatron_ext.ops.ssd.kernels_tiles import chunk_scan
from megatron_ext.ops.triton import aot

wide = aot.LAYOUTS[-1]
few = kernels.FEW[kernels.NARROW, 32]
scan = next(one for one in chunk_scan.configs if one["N"] == 128)
cases = {
    "prefill": (kernels.paged_prefill, kernels.many(kernels.NARROW, 64, 80), {"T": "bf16"}, aot.ALIGNED, 80),
    "prefill of others": (kernels.paged_prefill, kernels.many(kernels.NARROW, 64, 90), {"T": "bf16"}, aot.ALIGNED, 80),
    "decode": (kernels.paged_decode_split, few, {"T": "bf16"}, aot.ALIGNED, 80),
    "decode without a limit": (
        kernels.paged_decode_split, dataclasses.replace(few, registers=None), {"T": "bf16"}, aot.ALIGNED, 80
    ),
    "scan": (chunk_scan, scan, {"T": "bf16", "Z": "bf16"}, wide, 90),
}
print(json.dumps({name: aot.compile_case(aot.Case(*case)).spilled_bytes > 0 for name, case in cases.items()}))
"""


@pytest.mark.long
@pytest.mark.skipif(not triton.can_be_imported(), reason="triton cannot be imported")
def test_configurations_near_the_limit_do_not_spill(tmp_path: Path) -> None:
    """CU-12, CU-3: the chosen tiles and limits of registers, beside those that would spill."""
    assert found_by(SPILLS, tmp_path) == {
        "prefill": False,
        "prefill of others": True,
        "decode": False,
        "decode without a limit": True,
        "scan": False,
    }
