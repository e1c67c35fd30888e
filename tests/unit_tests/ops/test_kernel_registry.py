"""CU-2, CU-3: no kernel can be reached that is not registered, compiled ahead of time, and tested."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_ext.ops import triton
from megatron_ext.ops.triton.kernel_registry import Kernel, all_kernels, config, watch
from tests.unit_tests.support.source import PACKAGE, ROOT, parse, python_files

HERE = Path(__file__).parent
OPS = PACKAGE / "ops"
NEED_TRITON = {"aot.py", "device.py"}  # of ops/triton, beside the kernels: nothing imports them unasked
needs_triton = pytest.mark.skipif(not triton.can_be_imported(), reason="triton cannot be imported")


def is_kernel_file(path: Path) -> bool:
    return path.is_relative_to(OPS) and (path.stem.startswith("kernels") or path.name in NEED_TRITON)


def imports_triton(node: ast.stmt) -> bool:
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
    return any(name.split(".")[0] == "triton" for name in names)


def launches(tree: ast.AST) -> list[ast.Call]:
    """Calls as Triton has them: kernel[grid](...)."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [call for call in calls if isinstance(call.func, ast.Subscript) and isinstance(call.func.ctx, ast.Load)]


def listed(tree: ast.Module) -> list[str]:
    """The kernels that a module of tests lists as COVERED."""
    lists = [
        node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "COVERED"
    ]
    return [name for one in lists for name in ast.literal_eval(one)]


def test_only_kernels_import_triton() -> None:
    """CU-3: the package can be imported without triton."""
    files = [path for path in python_files(PACKAGE) if re.search(r"import .*triton|from triton", path.read_text())]
    others = [path for path in files if not is_kernel_file(path)]
    importing = [str(path.relative_to(ROOT)) for path in others if any(map(imports_triton, parse(path).body))]
    assert len(others) < len(files), "imports are found"
    assert importing == []


def test_only_the_registry_launches_kernels() -> None:
    """CU-3: a kernel runs by `Kernel.launch`."""
    found = {path: [call for call in launches(parse(path)) if call.keywords] for path in python_files(OPS)}
    assert found.pop(OPS / "triton/kernel_registry.py"), "launches are found"
    assert {str(path): [ast.unparse(call) for call in calls] for path, calls in found.items() if calls} == {}


@needs_triton
def test_every_kernel_is_tested_beside_its_formula() -> None:
    """CU-2: the tests of an operator list the kernels that they cover, each with what launches it."""
    covered = {name for path in sorted(HERE.glob("test_*.py")) for name in listed(parse(path))}
    assert {kernel.name for kernel in all_kernels()} == covered


@needs_triton
@pytest.mark.skipif(not triton.is_interpreted(), reason="kernels are not interpreted here")
def test_a_launch_that_was_not_compiled_is_an_error() -> None:
    """CU-3: another configuration, another type."""
    kernel = next(one for one in all_kernels() if one.name == "conv_decode")
    with pytest.raises(AssertionError, match="not a registered configuration"):
        kernel.launch((1,), config(WINDOW=9))
    wrong: dict[str, object] = dict.fromkeys(kernel.pointers, torch.zeros(1, dtype=torch.float64))
    with watch(), pytest.raises((AssertionError, KeyError)):
        kernel.launch((1,), kernel.configs[0], **wrong)


@needs_triton
def test_specialization_is_what_triton_compiles_for() -> None:
    """CU-20: the same facts as those of Triton's own key, for each parameter that it looks at."""
    kernel = next(one for one in all_kernels() if one.name == "conv_states")
    whole = torch.zeros(64, dtype=torch.bfloat16)
    given: dict[str, object] = dict.fromkeys(kernel.pointers, whole) | dict.fromkeys(kernel.strides, 16) | {"kept": 1}
    found = kernel.specialization(given)
    assert found == {
        f"{name}: 16" for name in ("x", "live", "snapshots", "x_row", "live_row", "snapshot_row", "channels")
    }
    odd = kernel.specialization(given | {"x": whole[1:], "slots": whole[1:], "live_row": 1, "channels": 2**31})
    assert found - odd == {"x: 16", "live_row: 16"}
    assert odd - found == {"live_row: 1", "channels: i64"}


class OnSecondDevice(torch.Tensor):
    """Tensor that says to be on the second CUDA device."""

    device = torch.device("cuda", 1)


def test_a_launch_is_on_the_device_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """CU-1: Triton launches on the current device, which may be another one."""
    current, launched = [0], []

    class Device:
        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            self.before, current[0] = current[0], self.index

        def __exit__(self, *_: object) -> None:
            current[0] = self.before

    class Function:
        def __getitem__(self, grid: tuple[int, ...]) -> object:
            return lambda **_: launched.append(current[0])

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", Device)
    options = config(N=16)
    kernel = Kernel("a_kernel", Function(), {"x": "T"}, (), (), (), ({"T": "fp32"},), (options,))
    x = torch.zeros(3)
    for one in (x.as_subclass(OnSecondDevice), x):
        kernel.launch((1,), options, n=5, x=one)
    assert launched == [1, 0]
    assert current == [0]


@needs_triton
def test_a_kernel_is_the_same_wherever_its_facts_begin() -> None:
    """CU-3: launches key what is compiled by alignment, save for what lies anywhere in a step's buffer."""
    from triton.runtime.jit import JITFunction

    for kernel in all_kernels():
        function = kernel.function
        if not isinstance(function, JITFunction):  # interpreted
            function = JITFunction(function.fn, **function.kwargs)
        for parameter in function.params:
            if parameter.name in (*kernel.pointers, *kernel.strides):
                anywhere = parameter.name not in kernel.aligned
                assert parameter.do_not_specialize_on_alignment == anywhere, parameter.name
            assert parameter.do_not_specialize == (parameter.name in kernel.counts), parameter.name
            if parameter.name.endswith(("seqlens", "slots", "ends")):
                assert parameter.name not in kernel.aligned, parameter.name


@needs_triton
@pytest.mark.long
def test_a_short_selection_compiles_for_a_gpu(tmp_path: Path) -> None:
    """CU-3, CU-12: the tool compiles one configuration of each kernel without a GPU; nothing spills."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop(triton.INTERPRET, None)
    command = [sys.executable, str(ROOT / "tools/compile_kernels.py"), "--quick"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    for kernel in all_kernels():
        assert kernel.name in done.stdout
    assert "spills" in done.stdout
