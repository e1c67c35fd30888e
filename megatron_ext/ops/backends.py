"""Choice of an operator's implementation: by its input, by what this machine has, or by request.

An operator's package lists its backends, the preferred one first. The last one is the reference: plain torch, any
device, the ground truth for the others. A backend whose libraries are missing takes no input.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar

from torch import Tensor

from megatron_ext.ops.cpp import say

P = ParamSpec("P")
R = TypeVar("R")


class NoKernelError(Exception):
    """Inputs that a backend has no kernel for. The message says why."""


@functools.cache
def log_once(line: str) -> None:
    """Log a line once."""
    say(line)


@dataclass(frozen=True)
class Backend:
    """Base of backends; their functions depend on the operator, and may raise `NoKernelError`.

    Attributes:
        name: Unique among the operator's backends.
        takes: Returns whether the backend supports a main input's device and dtype, and gradients if needed.
    """

    name: str
    takes: Callable[[Tensor], bool]


@dataclass(frozen=True)
class FunctionBackend(Backend):
    """Backend of an operator whose functions are written in plain torch, see `Operator`.

    Attributes:
        find: Returns the backend's function of this name, with the reference's signature; None for the reference.
    """

    find: Callable[[str], Callable[..., object] | None]


B = TypeVar("B", bound=Backend, covariant=True)
AUTO = "auto"  # in place of a backend's name: no preference
_PREFERRED: ContextVar[str] = ContextVar("preferred", default=AUTO)


@contextmanager
def preferring(name: str) -> Iterator[None]:
    """Prefer the backend of this name, or AUTO, in this thread; operators that lack it choose as with AUTO."""
    token = _PREFERRED.set(name)
    try:
        yield
    finally:
        _PREFERRED.reset(token)


class Backends(Generic[B]):
    """Backends of one operator.

    Args:
        operator: Name of the operator, for errors.
        backends: Backends, the preferred one first; the last one takes any input.
    """

    def __init__(self, operator: str, *backends: B) -> None:
        self.operator = operator
        self._backends = {backend.name: backend for backend in backends}
        assert len(self._backends) == len(backends), f"two backends of {operator} have one name"
        self._forced: B | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the backends available here, the preferred one first."""
        return tuple(self._backends)

    def choose(self, x: Tensor) -> B:
        """Return the backend for the main input `x`: the forced or preferred one, or the first that takes it."""
        if self._forced is not None:
            return self._forced
        preferred = self._backends.get(_PREFERRED.get())
        if preferred is not None:
            return preferred
        return next(backend for backend in self._backends.values() if backend.takes(x))

    def compute(self, x: Tensor, call: Callable[[B], R]) -> R:
        """Call the backend for the main input `x`; the reference if it has no kernel, which is logged for each reason.

        Args:
            x: The main input.
            call: Computes the operator with a backend, which may raise `NoKernelError` before it has written anything.
        """
        try:
            return call(self.choose(x))
        except NoKernelError as error:
            log_once(f"{error}; the reference computes it")
            return call(list(self._backends.values())[-1])

    @contextmanager
    def forced(self, name: str) -> Iterator[None]:
        """Use this backend whatever is preferred, as contract tests and comparisons need.

        Raises:
            ValueError: The operator has no such backend here.
        """
        if name not in self._backends:
            raise ValueError(f"{self.operator} has no backend {name!r} here; available are {', '.join(self.names)}")
        before, self._forced = self._forced, self._backends[name]
        try:
            yield
        finally:
            self._forced = before


REFERENCE = FunctionBackend("reference", lambda x: True, lambda name: None)


class Operator(Backends[FunctionBackend]):
    """Operator of one function or several, decorated with it: the functions themselves are the reference.

    The main input of a function is its first argument, or the first tensor in that.
    """

    def __init__(self, name: str, *backends: FunctionBackend) -> None:
        super().__init__(name, *backends, REFERENCE)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Return a function that is computed by the chosen backend; by itself if that has no kernel."""
        name = function.__name__

        @functools.wraps(function)
        def compute(*args: P.args, **kwargs: P.kwargs) -> R:
            def call(backend: FunctionBackend) -> R:
                run: Any = backend.find(name) or function
                return run(*args, **kwargs)

            first: Any = args[0]
            return self.compute(first if isinstance(first, Tensor) else first[0], call)

        return compute
