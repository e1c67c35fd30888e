"""Plain script around transformers: the shared prefix is prefilled once, its cache copied for each request.

The script is told where the prefix ends, and prefills in pieces, since the scan of transformers without CUDA keeps
every weight of a chunk. Requests with a shared prefix are computed one after the other, others in one batch.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from transformers import AutoModelForCausalLM

from benchmarks.cases import Run
from benchmarks.models import without_time_step_limit
from benchmarks.peers.sizes import Size
from benchmarks.peers.work import StandardRows, standard


class Script:
    """Script that serves one batch after the other. See `benchmarks.peers.work.Peer`.

    Args:
        model: Directory of the model.
        piece: Tokens that are prefilled at a time.
    """

    def __init__(self, model: str, piece: int) -> None:
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self._model, self._piece = without_time_step_limit(loaded).eval(), piece
        self._waiting: list[tuple[int, list[int], int]] = []
        self._shared, self._continues = 0, False
        self._kept: list[tuple[list[int], object]] = []  # prefixes and their caches
        self._steps: Iterator[list[tuple[int, list[int], int, bool]]] = iter(())  # of the batch

    def forget(self, shared: int = 0, *, continues: bool = False) -> None:
        """Drop all copies of caches."""
        self._kept.clear()
        self._shared, self._continues = shared, continues

    def submit(self, key: int, prompt: list[int], count: int) -> None:
        """Queue a request."""
        self._waiting.append((key, prompt, count))

    def step(self) -> Iterator[tuple[int, list[int], int, bool]]:
        """Compute a step of the batch, or begin the next one."""
        found = next(self._steps, None)
        if found is None:
            if len(self._waiting) == 1 or self._shared:
                self._steps = self._alone(*self._waiting.pop(0))
            else:
                self._steps = self._batch(self._waiting)
                self._waiting = []
            found = next(self._steps)
        yield from found

    def _alone(self, key: int, prompt: list[int], count: int) -> Iterator[list[tuple[int, list[int], int, bool]]]:
        """Compute a request with what is kept of its prompt, and keep its own cache."""
        fitting = [one for one in self._kept if one[0] == prompt[: len(one[0])]]
        known, cache = max(fitting, key=lambda one: len(one[0]), default=([], None))
        at, cache = len(known), copy.deepcopy(cache)
        if at == 0 and self._shared:
            at = self._shared
            _, cache = self._feed([prompt[:at]], None)
            self._kept.append((prompt[:at], copy.deepcopy(cache)))
        output: list[int] = []
        new, cache = self._feed([prompt[at:]], cache)
        while True:
            output += new
            if len(output) == count and self._continues:
                self._kept.append(([*prompt, *output[:-1]], cache))
            yield [(key, new, len(known), len(output) == count)]
            if len(output) == count:
                return
            new, cache = self._feed([new], cache)

    def _batch(self, batch: list[tuple[int, list[int], int]]) -> Iterator[list[tuple[int, list[int], int, bool]]]:
        """Compute requests with prompts of equal length, which generate equally many tokens."""
        count = batch[0][2]
        new, cache = self._feed([prompt for _, prompt, _ in batch], None)
        for number in range(1, count + 1):
            yield [(key, [token], 0, number == count) for (key, _, _), token in zip(batch, new, strict=True)]
            if number < count:
                new, cache = self._feed([[token] for token in new], cache)

    @torch.inference_mode()
    def _feed(self, rows: list[list[int]], cache: object) -> tuple[list[int], object]:
        """Return the next token of each row, and the cache."""
        ids = torch.tensor(rows)
        for start in range(0, ids.shape[1], self._piece):
            piece = ids[:, start : start + self._piece]
            output = self._model(piece, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = output.past_key_values
        return output.logits[:, -1].argmax(-1).tolist(), cache


@standard()
def transformers(run: Run, model: str, size: Size) -> None:
    """Standard rows, served by a script that copies caches of transformers; none of several requests at once."""
    StandardRows(run, Script(model, size.piece), size, is_sequential=True).measure()
