"""SC-10: the compiled library of C++ operators: its sources, vectors, threads and exponential."""

from __future__ import annotations

import pytest
import torch

from megatron_ext.ops import cpp
from megatron_ext.ops.causal_conv1d import CAUSAL_CONV1D
from megatron_ext.ops.cpp import library_build

needs_compiler = pytest.mark.skipif(not cpp.can_be_built(), reason="there is no C++ compiler")


@needs_compiler
class TestLibrary:
    """The real one."""

    def test_it_is_compiled_for_the_vectors_of_torch(self):
        name, width = cpp.kernels().vectors().split()
        capability = torch.backends.cpu.get_cpu_capability()
        assert name == (capability if capability in library_build._VECTOR_FLAGS else "DEFAULT")
        assert int(width) == {"AVX512": 16, "AVX2": 8}.get(name, int(width))

    @pytest.mark.parametrize("count", [1, 3])
    def test_its_threads_are_those_of_torch(self, count):
        """The library has not found another OpenMP."""
        before = torch.get_num_threads()
        try:
            torch.set_num_threads(count)
            assert cpp.kernels().threads() == count
        finally:
            torch.set_num_threads(before)

    def test_exp(self):
        """Decay of states of 1, at these rates in steps of 1."""
        rates = torch.cat([torch.linspace(-87, 88, 20_001), torch.tensor([-0.0, 0.0, -torch.inf, -1e30, torch.nan])])
        steps, zero, live = torch.ones(1, len(rates)), torch.zeros(1, 1, 1), torch.ones(1, len(rates), 1, 1)
        cpp.kernels().ssd_decode(zero.expand(1, len(rates), 1), steps, rates, zero, zero, None, None, 0, live)
        found, want = live.flatten(), rates.double().exp()
        assert ((found - want).abs() / want)[:-3].max() < 2e-7
        assert found[-4] == 1
        assert (found[-3:-1] < 2e-38).all()
        assert found[-1].isnan()

    def test_training_is_left_to_the_reference(self):
        x = torch.zeros(1, requires_grad=True)
        assert CAUSAL_CONV1D.backends.choose(x).name == "reference"
        with torch.no_grad():
            assert CAUSAL_CONV1D.backends.choose(x).name == "cpp"
        assert CAUSAL_CONV1D.backends.choose(x.detach().double()).name == "reference"
        assert CAUSAL_CONV1D.backends.choose(torch.zeros(1, device="meta")).name == "reference"
