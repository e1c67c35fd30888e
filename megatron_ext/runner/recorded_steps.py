"""Recorded decode steps on CPUs: the operators of a forward, repeated in C++ on fixed buffers, without Python.

The forward of a decode step depends on its number of requests and on values in tensors, so all steps of one size make
the same operator calls. The first two steps of a size run the model's Python code and are recorded, and if both made
the same calls on the same memory, later ones repeat these calls. Results are equal to the bit, since they come from the
same operators on the same values. Sampling, snapshots and all else of a step are as in any eager step.

Steps that verify drafts are recorded by their layout: how many tokens each request has, and where states are kept.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import is_dataclass, replace
from operator import attrgetter, is_
from typing import Any, Final, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch._C._dynamo.guards import dict_version
from torch.nn.modules import module as torch_module

from megatron_ext.mixers.recurrent import RecurrentStep
from megatron_ext.ops.cpp.operator_record import OperatorRecord, record
from megatron_ext.ops.linear import Packable
from megatron_ext.ops.paged_attention import PagedBatch
from megatron_ext.ops.varlen import stage_arrays
from megatron_ext.prefix_cache.block_pool import BlockId
from megatron_ext.runner.input_writer import BlockRows, StagingRules
from megatron_ext.runner.model_input import ModelInput, SamplingRow, stage_step
from megatron_ext.scheduling.step import ScheduledChunk, ScheduledStep

logger = logging.getLogger(__name__)

MAX_ROWS: Final = 128
"""Tokens of the largest recorded step; in larger ones the operators take far longer than the Python around them."""
MAX_SIZES: Final = 64
"""Sizes whose records are kept, those used last; a record takes some 100 KB."""
_ATTEMPTS: Final = 4
_NARROWEST: Final = 16  # blocks of the narrowest block table; wider ones double
_RUNNING_SLOT: Final = attrgetter("running_slot")
_FORWARD: Final = attrgetter("forward")
_MAX_CHANGES: Final = 16  # of the model in a row, without a repeated step between them, before they are reported
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
        hook: Id of the hook, whose operators are recorded together with the forward's.
    """

    hook: int

    def writing(self, chunks: Sequence[ScheduledChunk]) -> AbstractContextManager[None]:
        """Return the context of a step that writes the outputs of these chunks."""


class ModuleSnapshot:
    """All that a forward's Python code finds in its modules and that may be replaced: parameters, modules, hooks.

    Attributes of modules and fields of their configurations are compared as well. Changes inside other objects that
    attributes hold go unnoticed.

    Args:
        model: Model in eval mode.
        hook: Id of a forward hook that changes no record; -1 without one.
    """

    def __init__(self, model: nn.Module, hook: int = -1) -> None:
        self._model = model
        self.recorded_hook = hook
        self.renew()

    def renew(self) -> None:
        """Take what there is now as current."""
        modules = list(self._model.modules())
        owners = [vars(one) for one in modules]
        spaces: list[Any] = [space for one in modules for space in (one._parameters, one._buffers, one._modules)]
        places = [(space, name) for space in spaces for name in space]
        places += [(own, name) for own in owners for name, held in own.items() if isinstance(held, Tensor)]
        places += [(vars(one), "packed") for one in modules if isinstance(one, Packable)]
        self._spaces, self._names = [space for space, _ in places], [name for _, name in places]
        self._held: list[object] | None = list(map(dict.get, self._spaces, self._names))
        configs = {id(held): vars(held) for own in owners for held in own.values() if _is_config(held)}
        self._owners = [*owners, *configs.values()]
        self._classes = list({type(one) for one in modules})
        self._values = self._read()
        self._dicts = [*self._owners, *filter(None, spaces)]
        self._stamps = self._stamp()
        hooks = [hooks for one in modules for hooks in (one._forward_hooks, one._forward_pre_hooks)]
        self._hooks = [one for one in hooks if self.recorded_hook not in one]
        self._recorded = [one for one in hooks if self.recorded_hook in one]

    def release(self) -> None:
        """Keep nothing alive; it is not current until the next `renew`."""
        self._held, self._values, self._stamps = None, [], []

    def _read(self) -> list[object]:
        """Return attributes of modules, fields of configurations, and forwards of classes, as they are now."""
        return [*map(dict, self._owners), *map(_FORWARD, self._classes)]

    def _stamp(self) -> list[object]:
        """Return versions of all dictionaries, which other values change, and forwards of classes: compared fast."""
        return [*map(dict_version, self._dicts), *map(_FORWARD, self._classes)]

    @property
    def has_same_tensors(self) -> bool:
        """True if no parameter, buffer, module or packed weight has been replaced since the last `renew`."""
        return self._held is not None and all(map(is_, map(dict.get, self._spaces, self._names), self._held))

    @property
    def _has_same_values(self) -> bool:
        try:
            return self._read() == self._values
        except (RuntimeError, ValueError):  # now a tensor or an array, which have no truth value
            return False

    @property
    def is_current(self) -> bool:
        """True if nothing has been replaced since the last `renew`."""
        stamps = self._stamp()
        if stamps != self._stamps and self.has_same_tensors and self._has_same_values:
            self._stamps = stamps  # equal values were written
        return stamps == self._stamps

    @property
    def has_hooks(self) -> bool:
        """True if a forward calls other hooks than the recorded one: Python code that a record does not repeat."""
        is_hooked = any(self._hooks) or any(len(hooks) > 1 for hooks in self._recorded)
        return is_hooked or bool(torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks)


def _is_config(held: object) -> bool:
    """Return whether the value of an attribute is a dataclass with fields that may be assigned."""
    return is_dataclass(held) and not isinstance(held, type) and hasattr(held, "__dict__")


class _Recorded:
    """Record of steps that make the same operator calls on the same buffers."""

    has_drafts = False

    def __init__(self) -> None:
        self.record: OperatorRecord | None = None
        self.signature = ""  # of the last step that was recorded
        self.attempts = 0

    def drop(self) -> None:
        """Drop the record; two more steps make another one."""
        self.record, self.signature, self.attempts = None, "", 0

    def stage(self, chunks: tuple[ScheduledChunk, ...]) -> ModelInput:
        """Write a step into the buffers; see `stage_step`."""
        raise NotImplementedError


class _Size(_Recorded):
    """Decode steps of one size.

    Args:
        rows: R, requests.
        width: W, blocks of the longest table at most.
        rules: Constants of pools and model.
    """

    def __init__(self, rows: int, width: int, rules: StagingRules) -> None:
        super().__init__()
        self._rules = rules
        self._numbers = torch.zeros(5, rows, dtype=torch.int64)
        self._table = torch.zeros(rows, width, dtype=torch.int32)
        self._number_array, self._table_array = self._numbers.numpy(), self._table.numpy()
        self._written: list[Sequence[BlockId]] = [()] * rows
        self._firsts, self._rows = torch.arange(rows + 1), torch.arange(rows)

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


class _Layout(_Recorded):
    """Steps that verify drafts, of one layout; decodes without drafts may be among them, in front.

    Args:
        width: W, blocks of the longest table at most.
        rules: Constants of pools and model.
    """

    has_drafts = True

    def __init__(self, width: int, rules: StagingRules) -> None:
        super().__init__()
        self._width, self._rules, self._block_rows = width, rules, BlockRows()
        self._staged: dict[str, Tensor] = {}
        self._arrays: dict[str, np.ndarray] = {}  # the same memory
        self._true = torch.zeros(0, dtype=torch.bool)

    def stage(self, chunks: tuple[ScheduledChunk, ...]) -> ModelInput:
        """Write the step into the buffers of the first one of this layout."""
        count = sum(chunk.is_decode for chunk in chunks)
        found = stage_step(ScheduledStep(chunks, count), self._rules, self._block_rows, place=self._place)
        batch, recurrent = found.paged_batch, found.recurrent
        if recurrent is not None:
            assert recurrent.prefill_slots is not None, "drafts are a prefill"
            live = replace(recurrent.prefill_slots, has_initial_state=self._true[count:])
            recurrent = replace(recurrent, decode_slots=self._staged["slots"][:count], prefill_slots=live)
        return replace(found, paged_batch=_Batch(**vars(batch)), recurrent=recurrent)

    def _place(self, arrays: dict[str, np.ndarray]) -> dict[str, Tensor]:
        table = arrays.pop("block_table")
        rows, width = table.shape
        if not self._staged:
            whole = np.zeros((rows, self._width), np.int32)
            self._staged = stage_arrays(arrays | {"block_table": whole}, self._rules.device)
            self._arrays = {name: kept.numpy() for name, kept in self._staged.items()}
            self._true = torch.ones(rows, dtype=torch.bool)
        self._arrays["block_table"][:, :width] = table
        for name, array in arrays.items():
            assert self._arrays[name].shape == array.shape, f"{name}: a step of another layout"
            self._arrays[name][:] = array
        return self._staged


class RecordedSteps:
    """Records of the decode steps of one engine, whose operators compute on the CPU in one process.

    Args:
        model: Model in eval mode.
        rules: Constants of pools and model.
        read_tokens: Maximum number of tokens of a chunk that is recorded though it verifies nothing, as a layer that
            drafts reads accepted tokens; 0 without such chunks.
        hook: Id of a forward hook that the recorded code does not call; -1 without one.
    """

    def __init__(self, model: nn.Module, rules: StagingRules, *, read_tokens: int = 0, hook: int = -1) -> None:
        self._model, self._rules, self._read_tokens = model, rules, read_tokens
        self._beside: list[RecordedSteps] = []
        self._sizes: dict[Hashable, _Recorded] = {}
        self._modules = ModuleSnapshot(model, hook)
        self._staged: tuple[_Recorded, ModelInput] | None = None
        self._kept: KeptOutputs | None = None
        self._changes = 0  # of the model since a step was repeated
        self._said: set[str] = set()
        self.problem = ""  # why no step can be recorded, until the model is changed
        self.problem_with_drafts = ""  # why no step with drafts can be

    def keep(self, outputs: KeptOutputs) -> None:
        """Record the copies of kept outputs, too."""
        self._kept, self._modules.recorded_hook = outputs, outputs.hook
        self._modules.renew()

    def forget(self) -> None:
        """Drop all records and the tensors they keep alive, after pools or weights have been replaced."""
        self._sizes.clear()
        self._modules.release()
        self._staged = None

    def check(self) -> None:
        """Drop the records, and the tensors they keep alive, if anything they use was replaced; before each step."""
        if not self._modules.is_current:
            self._renew()
        for one in self._beside:
            one.check()

    def beside(self, rules: StagingRules, read_tokens: int, hook: int) -> RecordedSteps:
        """Return records of steps of a part of the model with pools of its own; checked together with these."""
        found = RecordedSteps(self._model, rules, read_tokens=read_tokens, hook=hook)
        self._beside.append(found)
        return found

    def stage(self, step: ScheduledStep) -> ModelInput | None:
        """Stage a step that is to be recorded or repeated; None if it must be staged by `stage_step`."""
        self._staged = None
        count = sum(chunk.length for chunk in step.chunks)
        if self.problem or not 0 < count <= MAX_ROWS or not all(map(self._is_plain, step.chunks)):
            return None
        width = _width(max(len(one.block_ids) for one in step.chunks))
        if step.num_decode == len(step.chunks):
            chunks = tuple(sorted(step.chunks, key=_RUNNING_SLOT))
            size = self._of((count, width), lambda: _Size(count, width, self._rules))
        elif self.problem_with_drafts or step.forks or step.comparison is not None:
            return None
        else:
            chunks = step.chunks  # results are equal to the bit in this order only
            key = *map(_drafted, chunks), width
            size = self._of(key, lambda: _Layout(width, self._rules))
        staged = size.stage(chunks)
        self._staged = size, staged
        return staged

    def _is_plain(self, chunk: ScheduledChunk) -> bool:
        """Return whether a chunk decodes one token, verifies drafts after it, or reads a few tokens."""
        if chunk.start == 0 or chunk.sampling is None or chunk.scoring is not None:
            return False
        is_read = chunk.length <= self._read_tokens and not chunk.target_sampling
        is_verified = chunk.length == 1 + len(chunk.target_sampling) > 1
        return chunk.is_decode or is_read or is_verified

    def _of(self, key: Hashable, make: Callable[[], _Recorded]) -> _Recorded:
        """Return the steps of a size or layout, which are the last used ones now."""
        found = self._sizes.pop(key, None) or make()
        self._sizes[key] = found
        if len(self._sizes) > MAX_SIZES:
            del self._sizes[next(iter(self._sizes))]
        return found

    def forward(self, run: Callable[[], Tensor], step: ModelInput | None) -> Tensor:
        """Return the result of a step's forward.

        Args:
            run: Runs the model's Python code.
            step: The step; repeated only if `stage` has returned it last.
        """
        staged, self._staged = self._staged, None
        if staged is None or staged[1] is not step:
            return run()
        if self._modules.has_hooks:
            self._say("decode steps run the model's Python code while modules have forward hooks")
            return run()
        with nullcontext() if self._kept is None else self._kept.writing(step.chunks):
            return self._repeat(staged[0], run, step)

    def _repeat(self, size: _Recorded, run: Callable[[], Tensor], step: ModelInput) -> Tensor:
        """Repeat the step's forward if it has been recorded, else run and record it."""
        if not self._modules.has_same_tensors:  # since `check`
            self._renew(size)
        if size.record is not None and not size.record.is_current():
            size.drop()
        if size.record is None:
            return self._record(size, run, step)
        try:
            found = size.record.replay()
        except BaseException:
            size.drop()
            raise
        self._changes = 0
        return found

    def _renew(self, kept: _Recorded | None = None) -> None:
        """Drop all records, but the buffers of one size, and the reasons against recording: the model has changed."""
        self._modules.renew()
        if kept is not None:
            kept.drop()
        self._sizes = {key: one for key, one in self._sizes.items() if one is kept}
        self.problem = self.problem_with_drafts = ""
        self._changes += 1
        if self._changes == _MAX_CHANGES:
            self._say("decode steps are recorded and never repeated, as the model is changed before each of them")

    def _say(self, why: str) -> None:
        """Warn once that steps take longer than they could."""
        if why not in self._said:
            self._said.add(why)
            logger.warning(why)

    def _record(self, size: _Recorded, run: Callable[[], Tensor], step: ModelInput) -> Tensor:
        result, made, problem = record(run)
        assert isinstance(step.paged_batch, _Batch), "it was staged here"
        if not problem and step.paged_batch.lengths_were_read:
            problem = "lengths on the host"
        size.attempts += 1
        if made is not None and made.signature() == size.signature:  # two runs in a row have made the same calls
            size.record = made
        elif size.attempts >= _ATTEMPTS:
            problem = problem or "its operator calls differ from step to step"
        size.signature = "" if made is None else made.signature()
        if problem and size.has_drafts:  # plain decodes may still be recorded
            self.problem_with_drafts = problem
            self._sizes = {key: one for key, one in self._sizes.items() if not one.has_drafts}
            self._say(
                f"steps with drafts run the model's Python code, as their operators cannot be repeated: {problem}"
            )
        elif problem:
            self.problem = problem
            self._sizes.clear()
            self._say(f"decode steps run the model's Python code, as their operators cannot be repeated: {problem}")
        return result


def _drafted(chunk: ScheduledChunk) -> tuple[int, ...]:
    """Return all of a chunk that a layout depends on: its tokens, and after which of them states are kept."""
    if chunk.is_decode:
        return ()
    return chunk.length, len(chunk.target_sampling), *[one.position - chunk.start for one in chunk.snapshots]


def _width(blocks: int) -> int:
    """Return the width of the block tables of a size."""
    return max(_NARROWEST, 1 << (blocks - 1).bit_length())
