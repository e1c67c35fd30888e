"""Which implementation of an operator runs: by what it is given, by what this machine has, or as it is asked for.

An operator's package lists its backends, the preferred one first. The last one is the reference: plain torch, any
device, the truth for the others. A backend whose libraries are missing takes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Generic, Protocol, TypeVar

from torch import Tensor


class Backend(Protocol):
    """What is asked of every backend; its functions are its operator's."""

    @property
    def name(self) -> str:
        """Unique among the operator's."""

    @property
    def takes(self) -> Callable[[Tensor], bool]:
        """Whether it computes for a main input like this one: its device, its type, whether gradients are wanted."""


def anything(_: Tensor) -> bool:
    """For backends of plain torch."""
    return True


B = TypeVar("B", bound=Backend)
_PREFERRED: ContextVar[str | None] = ContextVar("preferred", default=None)


@contextmanager
def preferring(name: str | None) -> Iterator[None]:
    """Let this thread's operators that have a backend of this name compute by it; None is no preference."""
    token = _PREFERRED.set(name)
    try:
        yield
    finally:
        _PREFERRED.reset(token)


class Backends(Generic[B]):
    """The backends of one operator.

    Args:
        operator: Its name, for errors.
        backends: The preferred one first; the last one takes anything.
    """

    def __init__(self, operator: str, *backends: B) -> None:
        self.operator = operator
        self._backends = {backend.name: backend for backend in backends}
        assert len(self._backends) == len(backends), f"two backends of {operator} have one name"
        self._forced: B | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """All there are here, the preferred one first."""
        return tuple(self._backends)

    def choose(self, x: Tensor) -> B:
        """The one that computes for the main input `x`: the forced or preferred one, or the first that takes it."""
        if self._forced is not None:
            return self._forced
        preferred = self._backends.get(_PREFERRED.get() or "")
        if preferred is not None:
            return preferred
        return next(backend for backend in self._backends.values() if backend.takes(x))

    @contextmanager
    def forced(self, name: str) -> Iterator[None]:
        """Let this one compute whatever is asked for, as contract tests and comparisons need it.

        Raises:
            ValueError: There is no such backend here.
        """
        if name not in self._backends:
            raise ValueError(f"{self.operator} has no backend {name!r} here; there are {', '.join(self.names)}")
        before, self._forced = self._forced, self._backends[name]
        try:
            yield
        finally:
            self._forced = before
