"""llama.cpp among its peers, through the C functions of llama-cpp-python, run by its own Python: fp32 and Q8_0.

llama.cpp restores no recurrent state by itself, so that prefixes are kept as a host program would: the prefix of a
prompt, which the peer is told, is computed in a sequence of its own, and copied for each request
(`llama_memory_seq_cp`); a request that has ended stays as the prefix of later ones.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.cases import Run
from benchmarks.peers.gguf_file import gguf_of, quantized
from benchmarks.peers.sizes import OWN, Size
from benchmarks.peers.work import StandardRows, standard

BATCH, MICRO_BATCH, SEQUENCES = 2_048, 512, 20  # as many as the largest row has, and prefixes
ROOM = 64  # tokens of a sequence after its prompt
Row = tuple[int, int, int, bool]  # token, position, sequence, whether the next token is asked for


@dataclass
class Sequence:
    """Sequence of llama.cpp's: a request, or a prefix that is kept.

    Attributes:
        number: Its number in the context.
        tokens: Tokens that it holds, the last one of a request excepted.
        key: Key of the request.
        count: Tokens that the request generates.
        cached: Prompt tokens that it has not computed.
        output: Generated tokens.
    """

    number: int
    tokens: list[int] = field(default_factory=list)
    key: int = -1
    count: int = 0
    cached: int = 0
    output: list[int] = field(default_factory=list)


class Llama:
    """Context of llama.cpp, made anew for each row. See `benchmarks.peers.work.Peer`.

    Args:
        path: GGUF file.
        size: Model and work.
    """

    def __init__(self, path: Path, size: Size) -> None:
        import llama_cpp

        self._lib, self._size = llama_cpp, size
        self._quiet = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self._quiet, None)
        options = llama_cpp.llama_model_default_params()
        options.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), options)
        if not self._model:
            raise RuntimeError(f"llama.cpp reads no model from {path}")
        self._batch = llama_cpp.llama_batch_init(BATCH, 0, 1)
        self._context: Any = None
        self.forget()

    def forget(self, shared: int = 0, *, continues: bool = False) -> None:
        """Replace the context by an empty one; without sharing each sequence has cells of its own."""
        if self._context:
            self._lib.llama_free(self._context)
        work, threads = self._size.work, int(os.environ["OMP_NUM_THREADS"])
        options = self._lib.llama_context_default_params()
        options.n_batch, options.n_ubatch = BATCH, MICRO_BATCH
        options.n_threads, options.n_threads_batch = threads, threads
        options.type_k = options.type_v = 0  # fp32
        options.kv_unified = bool(shared or continues)
        options.n_seq_max = SEQUENCES
        longest = -(-(max(work.unique, OWN) + ROOM) // 256) * 256
        options.n_ctx = 64 * work.blocks if options.kv_unified else SEQUENCES * longest
        self._context = self._lib.llama_init_from_model(self._model, options)
        if not self._context:
            raise RuntimeError(f"llama.cpp makes no context of {options.n_ctx} tokens")
        self._memory = self._lib.llama_get_memory(self._context)
        self._shared, self._continues = shared, continues
        self._free = list(range(SEQUENCES))
        self._waiting: list[tuple[int, list[int], int]] = []
        self._live: list[Sequence] = []
        self._kept: list[Sequence] = []

    def submit(self, key: int, prompt: list[int], count: int) -> None:
        """Queue a request."""
        self._waiting.append((key, prompt, count))

    def step(self) -> Iterator[tuple[int, list[int], int, bool]]:
        """Prefill what waits, or compute a token of each request."""
        if self._waiting:
            computed = [self._begin(*one) for one in self._waiting]
            rows = [
                row
                for one, (_, prompt, _) in zip(computed, self._waiting, strict=True)
                for row in _rows(one, prompt[len(one.tokens) :])
            ]
            self._waiting.clear()
            self._live += computed
        else:
            computed = list(self._live)
            rows = [row for one in computed for row in _rows(one, one.output[-1:])]
        for one, token in zip(computed, self._feed(rows), strict=True):
            one.output.append(token)
            has_ended = len(one.output) == one.count
            if has_ended:
                self._end(one)
            yield one.key, [token], one.cached, has_ended

    def _begin(self, key: int, prompt: list[int], count: int) -> Sequence:
        """Return a new request, which holds the kept prefix of its prompt."""
        fitting = [one for one in self._kept if one.tokens == prompt[: len(one.tokens)]]
        known = max(fitting, key=lambda one: len(one.tokens), default=None)
        request = Sequence(self._free.pop(), key=key, count=count, cached=len(known.tokens) if known else 0)
        if known is None and self._shared:
            known = Sequence(self._free.pop())
            self._feed(_rows(known, prompt[: self._shared], wants_next=False))
            self._kept.append(known)
        if known is not None:
            self._lib.llama_memory_seq_cp(self._memory, known.number, request.number, -1, -1)
            request.tokens = list(known.tokens)
        return request

    def _feed(self, rows: list[Row]) -> list[int]:
        """Compute rows; return the next token of each row that asks for it."""
        found: list[int] = []
        for start in range(0, len(rows), BATCH):
            part = rows[start : start + BATCH]
            for place, (token, position, sequence, wants_next) in enumerate(part):
                self._batch.token[place], self._batch.pos[place] = token, position
                self._batch.n_seq_id[place], self._batch.seq_id[place][0] = 1, sequence
                self._batch.logits[place] = wants_next
            self._batch.n_tokens = len(part)
            code = self._lib.llama_decode(self._context, self._batch)
            if code != 0:
                raise RuntimeError(f"llama_decode of {len(part)} tokens returned {code}")
            found += [self._next(place) for place, row in enumerate(part) if row[3]]
        return found

    def _next(self, place: int) -> int:
        import numpy

        logits = self._lib.llama_get_logits_ith(self._context, place)
        return int(numpy.ctypeslib.as_array(logits, (self._size.shape.vocabulary,)).argmax())

    def _end(self, ended: Sequence) -> None:
        """Drop an ended request, or keep it in place of the prefix that it has continued."""
        self._live.remove(ended)
        gone = [ended]
        if self._continues:
            gone = [one for one in self._kept if one.tokens == ended.tokens[: len(one.tokens)]]
            self._kept = [*(one for one in self._kept if one not in gone), ended]
        for one in gone:
            self._lib.llama_memory_seq_rm(self._memory, one.number, -1, -1)
            self._free.append(one.number)


def _rows(one: Sequence, tokens: list[int], *, wants_next: bool = True) -> list[Row]:
    """Add tokens to a sequence; return them as rows of a batch."""
    at = len(one.tokens)
    one.tokens = [*one.tokens, *tokens]
    last = len(one.tokens) - 1
    return [(token, i, one.number, wants_next and i == last) for i, token in enumerate(tokens, at)]


def _measure(run: Run, path: Path, size: Size) -> None:
    import llama_cpp

    run.remark(f"llama-cpp-python {llama_cpp.__version__}, {os.environ['OMP_NUM_THREADS']} threads")
    run.remark(llama_cpp.llama_print_system_info().decode())
    StandardRows(run, Llama(path, size), size).measure()


@standard(interpreter="LLAMA_PYTHON", reads_published=True)
def llama_f32(run: Run, model: str, size: Size) -> None:
    """Standard rows, served by llama.cpp in fp32; needs LLAMA_PYTHON."""
    _measure(run, gguf_of(Path(model), size), size)


@standard(interpreter="LLAMA_PYTHON", reads_published=True)
def llama_q8_0(run: Run, model: str, size: Size) -> None:
    """Standard rows, served by llama.cpp with weights in Q8_0, which people pick on CPUs; needs LLAMA_PYTHON."""
    _measure(run, quantized(gguf_of(Path(model), size)), size)
