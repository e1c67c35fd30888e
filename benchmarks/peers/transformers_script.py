"""Plain script around transformers: the shared prefix is prefilled once, its cache copied for each request.

The script is told where the prefix ends, computes one request at a time, and prefills in pieces, since the scan of
transformers without CUDA keeps every weight of a chunk.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from transformers import AutoModelForCausalLM

from benchmarks.cases import Run, case
from benchmarks.models import without_time_step_limit
from benchmarks.peers.work import OWN, measure

PIECE = 2_048


class Script:
    """Script that serves one request after the other. See `benchmarks.peers.work.Peer`."""

    def __init__(self, model: str) -> None:
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self._model = without_time_step_limit(loaded).eval()
        self._waiting: list[tuple[int, list[int], int]] = []
        self._kept: list[tuple[list[int], object]] = []  # prefixes and their caches

    def forget(self) -> None:
        """Drop all copies of caches."""
        self._kept.clear()

    def submit(self, key: int, prompt: list[int], count: int) -> None:
        """Queue a request."""
        self._waiting.append((key, prompt, count))

    def step(self) -> Iterator[tuple[int, list[int], int, bool]]:
        """Compute a whole request, token by token."""
        key, prompt, count = self._waiting.pop(0)
        fitting = [one for one in self._kept if one[0] == prompt[: len(one[0])]]
        known, cache = max(fitting, key=lambda one: len(one[0]), default=([], None))
        at, cache = len(known), copy.deepcopy(cache)
        if at == 0 and len(prompt) > OWN:
            logits, cache = self._feed(prompt[:-OWN], None)
            at = len(prompt) - OWN
            self._kept.append((prompt[:at], copy.deepcopy(cache)))
        logits, cache = self._feed(prompt[at:], cache)
        output = [int(logits.argmax())]
        yield key, output[:], len(known), count == 1
        while len(output) < count:
            logits, cache = self._feed(output[-1:], cache)
            output.append(int(logits.argmax()))
            if len(output) == count:
                self._kept.append(([*prompt, *output[:-1]], cache))
            yield key, output[-1:], len(known), len(output) == count

    @torch.inference_mode()
    def _feed(self, tokens: list[int], cache: object) -> tuple[torch.Tensor, object]:
        """Return the logits of the last token, and the cache."""
        for start in range(0, len(tokens), PIECE):
            piece = torch.tensor([tokens[start : start + PIECE]])
            output = self._model(piece, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = output.past_key_values
        return output.logits[0, -1], cache


@case("latency", in_bench=True, beside="latency.ours")
def transformers(run: Run, model: str = "") -> None:
    """Shared prefixes, unique prompts and chats, served by a script that copies caches of transformers."""
    measure(run, Script(model))
