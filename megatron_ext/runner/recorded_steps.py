"""Recorded decode steps on CPUs: the operators of a forward, repeated in C++ on fixed buffers, without Python.

The forward of a decode step depends on its number of requests and on values in tensors, so all steps of one size make
the same operator calls. The first two steps of a size run the model's Python code and are recorded, and if both made
the same calls on the same memory, later ones repeat these calls. Results are equal to the bit, since they come from the
same operators on the same values. Sampling, snapshots and all else of a step are as in any eager step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from operator import attrgetter, is_
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn

from megatron_ext.mixers.recurrent import RecurrentStep
from megatron_ext.ops.cpp.operator_record import OperatorRecord, record
from megatron_ext.ops.linear import Packable
from megatron_ext.ops.paged_attention import PagedBatch
from megatron_ext.prefix_cache.block_pool import BlockId
from megatron_ext.runner.input_writer import StagingRules
from megatron_ext.runner.model_input import ModelInput, SamplingRow
from megatron_ext.scheduling.step import ScheduledChunk, ScheduledStep

logger = logging.getLogger(__name__)

MAX_ROWS: Final = 128
"""Requests of the largest recorded step; in larger ones the operators take far longer than the Python around them."""
MAX_SIZES: Final = 64
"""Sizes whose records are kept, those used last; a record takes some 100 KB."""
_ATTEMPTS: Final = 4
_NARROWEST: Final = 16  # blocks of the narrowest block table; wider ones double
_RUNNING_SLOT: Final = attrgetter("running_slot")
_NO_TOKENS: Final = torch.zeros(0, dtype=torch.int64)


class _Batch(PagedBatch):
    """Batch that notes whether lengths are read on the host: a forward that does so cannot be repeated."""

    def __getattribute__(self, name: str) -> object:
        if name == "kv_lengths":
            self.__dict__["_is_read"] = True
        return super().__getattribute__(name)

    @property
    def lengths_were_read(self) -> bool:
        """True if `kv_lengths` has been read."""
        return "_is_read" in self.__dict__


class KeptOutputs(Protocol):
    """Outputs of a module that its forward hook copies to rows which are set before a step.

    Attributes:
        hook: Id of the hook, whose operators are recorded with those of the forward.
    """

    hook: int

    def stage(self, chunks: Sequence[ScheduledChunk]) -> None:
        """Set the rows of a step's tokens."""

    def commit(self) -> None:
        """Keep what the step has written."""

    def unstage(self) -> None:
        """Let later steps set the rows anew."""


class Wiring:
    """All that a forward's Python code finds in its modules and that may be replaced: parameters, modules, hooks.

    Args:
        model: Model in eval mode.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.recorded_hook: int | None = None
        self.renew()

    def renew(self) -> None:
        """Take what there is now as current."""
        modules = list(self._model.modules())
        spaces: list[Any] = [space for one in modules for space in (one._parameters, one._buffers, one._modules)]
        places = [(space, name) for space in spaces for name in space]
        places += [(vars(one), "packed") for one in modules if isinstance(one, Packable)]
        self._spaces, self._names = [space for space, _ in places], [name for _, name in places]
        self._held: list[object] | None = list(map(dict.get, self._spaces, self._names))
        hooks = [hooks for one in modules for hooks in (one._forward_hooks, one._forward_pre_hooks)]
        self._hooks = [one for one in hooks if self.recorded_hook not in one]
        self._recorded = [one for one in hooks if self.recorded_hook in one]

    def release(self) -> None:
        """Keep nothing alive; it is not current until the next `renew`."""
        self._held = None

    @property
    def is_current(self) -> bool:
        """True if nothing has been replaced since the last `renew`."""
        return self._held is not None and all(map(is_, map(dict.get, self._spaces, self._names), self._held))

    @property
    def has_hooks(self) -> bool:
        """True if a module has other forward hooks than the recorded one: Python code that a record does not repeat."""
        return any(self._hooks) or any(len(hooks) > 1 for hooks in self._recorded)


class _Size:
    """Buffers of the steps of one size, and their record.

    Args:
        rows: R, requests.
        width: W, blocks of the longest table at most.
        rules: Constants of pools and model.
    """

    def __init__(self, rows: int, width: int, rules: StagingRules) -> None:
        self._rules = rules
        self._numbers = torch.zeros(5, rows, dtype=torch.int64)
        self._table = torch.zeros(rows, width, dtype=torch.int32)
        self._number_array, self._table_array = self._numbers.numpy(), self._table.numpy()
        self._written: list[Sequence[BlockId]] = [()] * rows
        self._firsts, self._rows = torch.arange(rows + 1), torch.arange(rows)
        self.record: OperatorRecord | None = None
        self.signature = ""  # of the last step that was recorded
        self.attempts = 0

    def drop(self) -> None:
        """Drop the record; two more steps make another one."""
        self.record, self.signature, self.attempts = None, "", 0

    def stage(self, chunks: tuple[ScheduledChunk, ...]) -> ModelInput:
        """Write the step into the buffers; see `stage_step`."""
        size, dummy = self._rules.block_size, self._rules.dummy_block
        starts = [chunk.start for chunk in chunks]
        places = [
            (dummy if one.start < one.shared_end else one.block_ids[one.start // size]) * size + one.start % size
            for one in chunks
        ]
        self._number_array[:] = (
            [chunk.token_ids[0] for chunk in chunks],
            starts,
            places,
            [start + 1 for start in starts],
            [chunk.running_slot for chunk in chunks],
        )
        for row, chunk in enumerate(chunks):  # a table is replaced, never changed; see `BlockRows`
            if self._written[row] is not chunk.block_ids:
                self._table_array[row, : len(chunk.block_ids)] = chunk.block_ids
                self._written[row] = chunk.block_ids
        rows = len(chunks)
        token_ids, positions, slot_mapping, lengths, slots = self._numbers
        return ModelInput(
            chunks=chunks,
            num_decode=rows,
            num_tokens=rows,
            input_ids=token_ids,
            position_ids=positions,
            slot_mapping=slot_mapping,
            paged_batch=_Batch(
                rows,
                (1,) * rows,
                tuple([start + 1 for start in starts]),
                size,
                block_table=self._table,
                cu_seqlens_q=self._firsts,
                seqlens_k=lengths,
            ),
            recurrent=RecurrentStep(rows, slots, None, None) if self._rules.has_states else None,
            sample_tokens=self._rows,
            sampling=tuple([SamplingRow(one.request_id, one.sampling) for one in chunks if one.sampling is not None]),
            score_tokens=_NO_TOKENS,
            prompt_scores=(),
        )


class RecordedSteps:
    """Records of the decode steps of one engine, whose operators compute on the CPU in one process.

    Args:
        model: Model in eval mode.
        rules: Constants of pools and model.
    """

    def __init__(self, model: nn.Module, rules: StagingRules) -> None:
        self._rules = rules
        self._sizes: dict[tuple[int, int], _Size] = {}
        self._wiring = Wiring(model)
        self._staged: tuple[_Size, ModelInput] | None = None
        self._kept: KeptOutputs | None = None
        self.problem = ""  # why no step can be recorded

    def keep(self, outputs: KeptOutputs) -> None:
        """Record the copies of kept outputs, too."""
        self._kept, self._wiring.recorded_hook = outputs, outputs.hook
        self._wiring.renew()

    def forget(self) -> None:
        """Drop all records and what they keep alive, after pools or weights have been replaced."""
        self._sizes.clear()
        self._wiring.release()
        self._staged = None

    def check(self) -> None:
        """Drop the records, and what they keep in memory, if anything that they use was replaced; before each step."""
        if not self._wiring.is_current:
            self.forget()
            self._wiring.renew()

    def stage(self, step: ScheduledStep) -> ModelInput | None:
        """Stage a step that is to be recorded or repeated; None if it must be staged by `stage_step`."""
        self._staged = None
        count = len(step.chunks)
        is_decode = step.num_decode == count and all(map(_is_plain, step.chunks))
        if self.problem or not is_decode or not 0 < count <= MAX_ROWS:
            return None
        chunks = tuple(sorted(step.chunks, key=_RUNNING_SLOT))
        key = count, _width(max(len(one.block_ids) for one in chunks))
        size = self._sizes.pop(key, None) or _Size(*key, self._rules)
        self._sizes[key] = size  # the last one now
        if len(self._sizes) > MAX_SIZES:
            del self._sizes[next(iter(self._sizes))]
        staged = size.stage(chunks)
        self._staged = size, staged
        return staged

    def forward(self, run: Callable[[], Tensor], step: ModelInput | None) -> Tensor:
        """Return the result of a step's forward.

        Args:
            run: Runs the model's Python code.
            step: The step; repeated only if `stage` has returned it last.
        """
        staged, self._staged = self._staged, None
        if staged is None or staged[1] is not step or self._wiring.has_hooks:
            return run()
        if self._kept is None:
            return self._repeat(staged[0], run, step)
        try:
            self._kept.stage(step.chunks)
            result = self._repeat(staged[0], run, step)
            self._kept.commit()
            return result
        finally:
            self._kept.unstage()

    def _repeat(self, size: _Size, run: Callable[[], Tensor], step: ModelInput) -> Tensor:
        """Repeat the step's forward if it has been recorded, else run and record it."""
        if not self._wiring.is_current:
            self._renew(size)
        if size.record is not None and not size.record.is_current():
            size.drop()
        if size.record is None:
            return self._record(size, run, step)
        try:
            return size.record.replay()
        except BaseException:
            size.drop()
            raise

    def _renew(self, size: _Size) -> None:
        """Drop all records but the buffers of one size."""
        self._wiring.renew()
        size.drop()
        self._sizes = {key: one for key, one in self._sizes.items() if one is size}

    def _record(self, size: _Size, run: Callable[[], Tensor], step: ModelInput) -> Tensor:
        result, made, problem = record(run)
        assert isinstance(step.paged_batch, _Batch), "it was staged here"
        if not problem and step.paged_batch.lengths_were_read:
            problem = "lengths on the host"
        size.attempts += 1
        if made is not None and made.signature() == size.signature:
            size.record = made
        elif size.attempts >= _ATTEMPTS:
            problem = problem or "its operator calls differ from step to step"
        size.signature = "" if made is None else made.signature()
        if problem:
            self.problem = problem
            self.forget()
            logger.info("decode steps run the model's Python code, as their operators cannot be repeated: %s", problem)
        return result


def _is_plain(chunk: ScheduledChunk) -> bool:
    """Return whether a decode computes one token and samples the next."""
    return chunk.length == 1 and chunk.sampling is not None and not chunk.target_sampling and chunk.scoring is None


def _width(blocks: int) -> int:
    """Return the width of the block tables of a size."""
    return max(_NARROWEST, 1 << (blocks - 1).bit_length())
