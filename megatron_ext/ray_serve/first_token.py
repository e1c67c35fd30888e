"""Signal of a request's first token, from the ingress to the router beside it."""

from __future__ import annotations

from collections.abc import Callable


class FirstToken:
    """Signal with one listener. It stays in its process: a copy in another one has no listener."""

    def __init__(self) -> None:
        self._listener: Callable[[], object] | None = None

    def listen(self, listener: Callable[[], object]) -> None:
        """Call a function at the first token, instead of any other."""
        self._listener = listener

    def note(self) -> None:
        """Note a part of the answer; only the first one counts."""
        listener, self._listener = self._listener, None
        if listener is not None:
            listener()

    def __reduce__(self) -> tuple[type[FirstToken], tuple[()]]:
        """Pickle without the listener."""
        return FirstToken, ()
