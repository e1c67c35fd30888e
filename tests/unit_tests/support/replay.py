"""A stand-in for CUDA graphs on a CPU: what is captured is run again with the very tensors and numbers of the capture.

As in a graph nothing of the Python code runs again, so whatever it baked in is seen: a number from the host, a shape,
an address that was the step's own.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.unit_tests.support.programs import leaves


class Tape(TorchDispatchMode):
    """Keeps every operation with its arguments and what it gave."""

    def __init__(self) -> None:
        super().__init__()
        self._operations: list[tuple[Callable, tuple, dict, list[Tensor]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        given = {one.untyped_storage().data_ptr() for one in _tensors((args, kwargs))}
        made = _tensors(found)
        is_new = not any(one.untyped_storage().data_ptr() in given for one in made)
        self._operations.append((func, args, kwargs or {}, made if is_new else []))  # others are views, or in place
        return found

    def note(self, launch: Callable[[], object]) -> None:
        """Something else that a graph would have: a kernel, with the very tensors that it was given."""
        self._operations.append((launch, (), {}, []))

    def replay(self) -> None:
        for func, args, kwargs, made in self._operations:
            for old, new in zip(made, _tensors(func(*args, **kwargs)), strict=False):
                old.copy_(new)


def _tensors(value: object) -> list[Tensor]:
    return [one for one in leaves(value) if isinstance(one, Tensor)]


class ReplayedGraphs:
    """See `Capture`.

    Attributes:
        captured: Number of captured steps.
        replayed: Number of replays.
        forgotten: Number of times all of them were dropped.
    """

    takes_long = True

    def __init__(self) -> None:
        self.captured = self.replayed = self.forgotten = 0

    @torch.inference_mode()
    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        with (tape := Tape()):
            run()
        self.captured += 1

        def replay() -> None:
            self.replayed += 1
            tape.replay()

        return replay

    def forget(self) -> None:
        self.forgotten += 1
