"""Texts of prompts, decoded only if they are shown."""

from __future__ import annotations

import logging
from collections.abc import Callable

from megatron_ext.scheduling.record import RequestRecord

logger = logging.getLogger(__name__)

PromptText = Callable[[RequestRecord], str | None]


def submitted_text(record: RequestRecord) -> str | None:
    """Return the text that was submitted, if the prompt was a text."""
    return record.prompt_text


class PromptTexts:
    """Cache of prompt texts: the submitted text, or the decoded ids, decoded on first use, once for equal prompts.

    Args:
        detokenize: Token ids to text.
    """

    def __init__(self, detokenize: Callable[[list[int]], str]) -> None:
        self._detokenize = detokenize
        self._texts: dict[tuple[int, ...], str | None] = {}

    def __call__(self, record: RequestRecord) -> str | None:
        """Return the text of a request's prompt; None, with a warning, if its tokenizer fails: results are kept."""
        if record.prompt_text is not None:
            return record.prompt_text
        tokens = record.prompt_tokens
        if tokens not in self._texts:
            try:
                self._texts[tokens] = self._detokenize(list(tokens))
            except Exception as error:
                logger.warning("the prompt of request %s has no text: %s", record.request_id, error)
                self._texts[tokens] = None
        return self._texts[tokens]
