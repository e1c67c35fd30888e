"""Launches of a program on a device, counted without one: every operation that computes, and every kernel of ours.

Views and allocations launch nothing. torch's RMS norm and grouped product are one kernel on CUDA (the latter after one
that writes its arguments) and several operations on a CPU, so they are counted by their names; what Triton's
interpreter does meanwhile is not counted.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

import pytest
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_ext.ops.triton.kernel_registry import Kernel

OUTSIDE = "step"
"""Of what no mixer computes."""
_ALLOCATE = {"aten::empty", "aten::empty_like", "aten::new_empty", "aten::empty_strided", "aten::new_empty_strided"}
_VIEWS = {"aten::_unsafe_view", "aten::_reshape_alias", "aten::lift_fresh"}


class LaunchCounter(TorchDispatchMode):
    """Counts what runs within it.

    Attributes:
        launches: Launches by mixer and name.
        where: The mixer that computes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[tuple[str, str]] = Counter()
        self.where = OUTSIDE
        self._is_paused = False

    def note(self, name: str) -> None:
        """Something was launched."""
        if not self._is_paused:
            self.launches[self.where, name] += 1

    @contextlib.contextmanager
    def one(self, name: str) -> Iterator[None]:
        """Count everything within the context as one launch."""
        self.note(name)
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, str(func._schema.name)
        if name == "aten::_grouped_mm" or (name == "aten::rms_norm" and _is_one_kernel(*args, **kwargs)):
            with self.one(name):
                return func(*args, **kwargs)
        with self:  # count the parts of composite operations; inference mode has not decomposed them yet
            found = func.decompose(*args, **kwargs)
        if found is not NotImplemented:
            return found
        if not (func.is_view or name in _ALLOCATE or name in _VIEWS):
            self.note(name)
        return func(*args, **kwargs)

    def of(self, where: str) -> int:
        """Launches of a mixer."""
        return sum(count for (mixer, _), count in self.launches.items() if mixer == where)


def _is_one_kernel(x: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None) -> bool:
    """Return whether torch's RMS norm is one kernel on CUDA; otherwise it consists of several operations."""
    return weight is None or weight.dtype == x.dtype


@contextlib.contextmanager
def counted(
    mixers: dict[str, nn.Module], last: nn.Module | None = None, *, computes: bool = True
) -> Iterator[LaunchCounter]:
    """Count what is launched meanwhile.

    Args:
        mixers: Mixers whose launches are counted separately, by name. Launches after one are its own up to the next
            one: its sum, and the norm after that.
        last: Module after which `OUTSIDE` begins again, as it is before the first mixer.
        computes: Whether kernels compute, too; else what they would write is undefined.
    """
    counter, hooks = LaunchCounter(), []

    def launch(kernel: Kernel, *arguments: object, **named: object) -> None:
        with counter.one(kernel.name):
            if computes:
                plain(kernel, *arguments, **named)

    def enter(name: str):
        def note(*_: object) -> None:
            counter.where = name

        return note

    plain = Kernel.launch
    for name, mixer in mixers.items():
        hooks.append(mixer.register_forward_pre_hook(enter(name)))
    if last is not None:
        hooks.append(last.register_forward_hook(enter(OUTSIDE)))
    with pytest.MonkeyPatch.context() as patch, counter:
        patch.setattr(Kernel, "launch", launch)
        try:
            yield counter
        finally:
            for hook in hooks:
                hook.remove()
