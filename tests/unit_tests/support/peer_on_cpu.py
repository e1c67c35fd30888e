"""megatron-core 0.19.2's engine on a CPU, its kernels interpreted: what `benchmarks.gpu.megatron_0_19` calls exists.

Run as a script with a job, its packages first on PYTHONPATH, `TRITON_INTERPRET=1` and `python -O`: asserts that tensors
are on a CUDA device are the peer's, and not true here.
"""

from __future__ import annotations

import contextlib
import functools
import sys

import torch
from triton.runtime import autotuner

from megatron_ext.mcore import platform

PINNED = ("full", "empty", "zeros", "ones", "arange", "tensor", "full_like", "zeros_like", "empty_like")


def pretend() -> None:
    """Stand-ins beside those that megatron-core 0.16.1 needs."""
    platform.install_cpu_stand_ins()
    torch.cuda.memory_snapshot = lambda *_, **__: []
    torch.cuda.device = lambda *_: contextlib.nullcontext()
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    stream = torch.cuda.Stream
    stream.wait_event = stream.synchronize = lambda *_: None
    torch.Tensor.pin_memory = lambda tensor, *_: tensor
    torch.Tensor.record_stream = lambda *_: None
    torch.Tensor.is_cuda = property(lambda _: True)
    torch.cuda.CUDAGraph, torch.cuda.graph = Recorded, lambda *_, **__: contextlib.nullcontext()
    torch.cuda.graph_pool_handle, torch.cuda.set_stream = tuple, lambda _: None
    torch.cuda.empty_cache = lambda: None
    for name in PINNED:
        setattr(torch, name, _without_pinning(getattr(torch, name)))
    autotuner.Autotuner.__init__ = _first_configuration(autotuner.Autotuner.__init__)


class Recorded:
    """Graph whose replay computes nothing: its buffers keep the contents of the capture."""

    def replay(self):
        return

    def reset(self):
        return

    def register_generator_state(self, state):
        return


def _without_pinning(make):
    @functools.wraps(make)
    def made(*arguments, pin_memory=False, **options):
        return make(*arguments, **options)

    return made


def _first_configuration(initialize):
    """Return the first configuration, since nothing can be timed."""

    @functools.wraps(initialize)
    def initialized(tuner, *arguments, **options):
        initialize(tuner, *arguments, **options)
        tuner.configs = tuner.configs[:1]

    return initialized


if __name__ == "__main__":
    pretend()
    from benchmarks.gpu.megatron_0_19 import __main__ as peer

    sys.exit(peer.main())
