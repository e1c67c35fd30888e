"""CU-25: which prefills after cached keys are computed by spans, without running a kernel."""

from __future__ import annotations

import pytest

from megatron_ext.ops import triton
from tools.kernel_checks.layer_calls import Calls
from tools.kernel_checks.sizes import MODELS, Step
from tools.kernel_checks.virtual_launch import recording


@pytest.mark.skipif(not triton.is_interpreted(), reason="kernels are not interpreted here")
@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize(("tokens", "is_split"), [(256, True), (512, False)])
def test_tiles_that_fill_a_device_are_not_split(arch: int, tokens: int, is_split: bool, monkeypatch) -> None:
    """CU-25: fewer of the larger tiles do, whose partial sums would take much memory."""
    monkeypatch.setattr(triton, "architecture", lambda device: arch)
    with recording() as launches:
        dict(Calls(MODELS[0], Step(0, tokens, 131_072, is_captured=True)).all())["attention"]()
    assert ("merge_splits" in {one.kernel.name for one in launches}) is is_split
