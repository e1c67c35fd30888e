"""transformers, as a plain script has it: the shared prefix is prefilled once, its cache copied for each request.

Run by `benchmarks.bench`. It is told where the prefix ends, computes one request at a time, and its prefills go in
pieces, since its scan without CUDA keeps every weight of a chunk.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from transformers import AutoModelForCausalLM

from benchmarks.peers.work import OWN, arguments, run

PIECE = 2_048


class Script:
    """Script that serves one request after the other, with nothing shared between those in flight."""

    def __init__(self, model: str) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        for module in self._model.modules():
            if hasattr(module, "time_step_limit"):
                module.time_step_limit = (0.0, float("inf"))  # its chunked path alone would clamp
        self._waiting: list[tuple[int, list[int], int]] = []
        self._kept: list[tuple[list[int], object]] = []  # prefixes and their caches

    def forget(self) -> None:
        """See `Peer`."""
        self._kept.clear()

    def submit(self, key: int, prompt: list[int], count: int) -> None:
        """See `Peer`."""
        self._waiting.append((key, prompt, count))

    def step(self) -> Iterator[tuple[int, list[int], int, bool]]:
        """See `Peer`; a whole request, token by token."""
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
        """Logits of the last token, and the cache."""
        for start in range(0, len(tokens), PIECE):
            piece = torch.tensor([tokens[start : start + PIECE]])
            output = self._model(piece, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = output.past_key_values
        return output.logits[0, -1], cache


if __name__ == "__main__":
    options = arguments()
    torch.set_num_threads(options.threads)
    run(Script(options.model), options, peer="transformers", torch=torch.__version__)
