"""Prefill accounting: each prompt token of a request counts once, as skipped or computed for a named reason (EX-2)."""

from __future__ import annotations

from collections import Counter

from megatron_ext.config import RequestParams
from megatron_ext.prefix_cache.kept_data import DataKind
from megatron_ext.scheduling.explanation import Explanation, Reason


def general_reason(params: RequestParams, *, is_caching: bool, keeps_log_probs: bool = False) -> Reason | None:
    """Return why the whole prompt is computed, whatever is cached; None if that depends on the cache."""
    if not params.enable_prefix_caching:
        return Reason.OPTED_OUT
    if not is_caching:
        return Reason.CACHING_OFF
    if not params.wants_prompt_log_probs or (keeps_log_probs and not params.top_n_logprobs):
        return None
    return Reason.PROMPT_LOGPROBS


class PrefillLedger:
    """Ledger of the prompt tokens of one request.

    Counts by position, so that retried admissions, preemptions and suspensions cannot count a token twice.

    Args:
        prompt_length: Tokens of the prompt.
        known_length: Tokens of the prompt and of an output that an earlier request has begun; those are recomputed.
    """

    def __init__(self, prompt_length: int, known_length: int = 0) -> None:
        self.prompt_length = prompt_length
        self._known_length = known_length
        self.known_end = 0  # tokens below this position have been skipped or computed before
        self._matched_end = self._usable_end = 0
        self._block_size = 1
        self.general_reason: Reason | None = None  # why the cache is not used at all; None if it is
        self.retokenized = (0, 0)  # see `RequestInputs`
        self._lacking = Reason.PROMPT_LOGPROBS  # reason for matched blocks that are not usable
        self.matched_blocks: int | None = None  # at the first admission
        self.skipped = 0
        self.skipped_from_disk = 0  # skipped tokens that entries from disk have saved
        self.recomputed = 0
        self.reasons: Counter[str] = Counter()
        self.explanation: Explanation | None = None  # of the first admission, if explanations are on

    @property
    def computed(self) -> int:
        """Prompt tokens computed for the first time."""
        return self.reasons.total()

    def admit(
        self,
        resume_position: int,
        matched_blocks: int,
        block_size: int,
        usable_blocks: int | None = None,
        lacking: DataKind | None = None,
    ) -> int:
        """Account for the admission of the request into the batch.

        Args:
            resume_position: Position of the first token to compute; tokens before it are skipped.
            matched_blocks: Cached blocks that the request shares.
            block_size: Tokens of a block.
            usable_blocks: Blocks among them with all data that the request needs (see `kept_data`); None for all.
            lacking: Data that the next block lacks; None if all blocks are usable.

        Returns:
            Number of prompt tokens that are skipped now.
        """
        if self.matched_blocks is None:
            self.matched_blocks = matched_blocks
        self._block_size = block_size
        self._matched_end = matched_blocks * block_size
        self._usable_end = self._matched_end if usable_blocks is None else usable_blocks * block_size
        self._lacking = Reason.NO_ROUTING_INDICES if lacking is DataKind.ROUTING else Reason.PROMPT_LOGPROBS
        skipped = max(0, min(resume_position, self.prompt_length) - self.known_end)
        self.skipped += skipped
        self.known_end = max(self.known_end, resume_position)
        return skipped

    def compute(self, start: int, end: int) -> int:
        """Account for the computation of the tokens [start, end).

        Returns:
            Number of prefill tokens among them: prompt tokens, or tokens computed before.
        """
        again = max(0, min(end, self.known_end) - start)
        again += max(0, min(end, self._known_length) - max(start, self.known_end, self.prompt_length))
        self.recomputed += again
        first, last = max(start, self.known_end), min(end, self.prompt_length)
        new = max(0, last - first)
        if new:
            self._note_reasons(first, last)
        self.known_end = max(self.known_end, end)
        return again + new

    def _note_reasons(self, first: int, last: int) -> None:
        for reason, reason_end in self._reasons_by_position():
            count = min(last, reason_end) - first
            if count > 0:
                self.reasons[reason.value] += count
                first += count

    def _reasons_by_position(self) -> list[tuple[Reason, int]]:
        """Return each reason with the position up to which it applies, in ascending order."""
        if self.general_reason is not None:
            return [(self.general_reason, self.prompt_length)]
        whole_blocks_end = self.prompt_length // self._block_size * self._block_size
        return [
            (Reason.NO_SNAPSHOT, min(self._usable_end, self.prompt_length - 1)),
            (self._lacking, min(self._matched_end, self.prompt_length - 1)),
            (Reason.LAST_TOKEN, self._matched_end),
            (Reason.NOT_CACHED, min(self.retokenized[0] // self._block_size * self._block_size, whole_blocks_end)),
            (Reason.RETOKENIZED, min(self.retokenized[1], whole_blocks_end)),
            (Reason.NOT_CACHED, whole_blocks_end),
            (Reason.PARTIAL_BLOCK, self.prompt_length),
        ]
