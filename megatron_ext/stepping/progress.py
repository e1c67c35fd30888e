"""What living requests get step by step: made by the thread that steps, read by others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from megatron_ext.scheduling.request import Request


@dataclass(frozen=True)
class Update:
    """What a living request got since the update before; made by the engine's thread, read by another one.

    Its size is that of what is new: the prompt's log-probs, which are complete when the first token comes, are in the
    first update only.
    """

    prompt_tokens: tuple[int, ...]
    start: int  # generated tokens in the updates before
    generated_tokens: Sequence[int]
    generated_log_probs: Sequence[float]
    generated_top_n_log_probs: Sequence[dict[int, float]]
    prompt_log_probs: Sequence[float]
    prompt_top_n_log_probs: Sequence[dict[int, float]]

    @classmethod
    def of(cls, request: Request, start: int) -> Update:
        """What was generated from the `start`-th token on, as copies."""
        is_first = start == 0
        return cls(
            request.prompt_tokens,
            start,
            request.tokens[request.prompt_length + start :],
            request.output.generated_log_probs[start:],
            request.output.generated_top_n[start:],
            request.output.prompt_log_probs[:] if is_first else (),
            request.output.prompt_top_n[:] if is_first else (),
        )


class Progress:
    """What a living request has so far: its updates put together. The names are those of `RequestRecord`.

    Args:
        prompt_tokens: Of the request.
    """

    def __init__(self, prompt_tokens: tuple[int, ...]) -> None:
        self.prompt_tokens = prompt_tokens
        self.generated_tokens: list[int] = []
        self.generated_log_probs: list[float] = []
        self.generated_top_n_log_probs: list[dict[int, float]] = []
        self.prompt_log_probs: list[float] = []
        self.prompt_top_n_log_probs: list[dict[int, float]] = []

    def add(self, update: Update) -> None:
        """Append what is new. Whoever reads late finds all of it."""
        assert update.start == len(self.generated_tokens), "an update is missing"
        self.generated_tokens += update.generated_tokens
        self.generated_log_probs += update.generated_log_probs
        self.generated_top_n_log_probs += update.generated_top_n_log_probs
        self.prompt_log_probs += update.prompt_log_probs
        self.prompt_top_n_log_probs += update.prompt_top_n_log_probs


class Updates:
    """How much of each streamed request has been handed over; the engine thread's own.

    Args:
        fail: Told of a request whose update cannot be made; it gets none.
    """

    def __init__(self, fail: Callable[[int, Exception], None]) -> None:
        self._fail = fail
        self._handed: dict[int, int] = {}  # request id -> generated tokens

    def watch(self, ids: Iterable[int]) -> None:
        """These requests are streamed."""
        self._handed |= dict.fromkeys(ids, 0)

    def forget(self, ids: Iterable[int]) -> None:
        """These have ended: their records say everything."""
        for request_id in ids:
            self._handed.pop(request_id, None)

    def of(self, active: Iterable[Request]) -> dict[int, Update]:
        """Of the streamed ones among `active` that have new tokens."""
        updates = {}
        for request in active:
            start = self._handed.get(request.request_id)
            if start is not None and request.generated_count > start:
                try:
                    update = Update.of(request, start)
                except Exception as error:
                    self._fail(request.request_id, error)
                    continue
                updates[request.request_id] = update
                self._handed[request.request_id] = start + len(update.generated_tokens)
        return updates
