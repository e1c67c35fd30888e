"""Texts as token ids, beside the event loop unless they are short.

Long ones are refused if they cannot fit, else one is done at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from megatron_ext.server.api_errors import text_too_long
from megatron_ext.server.openai.request_fields import whole_characters
from megatron_ext.text.tokenizer import TextTokenizer, Tokenizer

# Characters. Longer texts take hundreds of bytes a character while they become tokens: several at once would add up.
LONG_TEXT = 100_000
# Those up to here take less time than a thread takes to be woken while the engine's works (some 0.3 ms).
SHORT_TEXT = 512


class TextEncoder:
    """Makes prompts of texts.

    Args:
        tokenizer: Of the model.
        tokenize: A text to ids; called in threads.
        longest_sequence: Tokens that a prompt has at most.
    """

    def __init__(self, tokenizer: Tokenizer, tokenize: Callable[[str], list[int]], longest_sequence: int) -> None:
        self._tokenize = tokenize
        # None: one token can stand for any text, as with ids that have spaces between them.
        token = tokenizer.longest_token if isinstance(tokenizer, TextTokenizer) else None
        self._sequence = longest_sequence
        self._max = None if token is None else longest_sequence * token
        self._one_by_one = ThreadPoolExecutor(1, "long texts")

    async def encode(self, text: str, tokenize: Callable[[str], list[int]] | None = None) -> list[int]:
        """Ids of a text.

        Args:
            text: A prompt, or a rendered conversation.
            tokenize: What makes ids of it, if it is not the tokenizer alone.

        Raises:
            ApiError: However it is cut into tokens, there are too many.
            ConfigError: It is no text.
        """
        if self._max is not None and len(text) > self._max:
            raise text_too_long(len(text), self._max, self._sequence)
        whole_characters(text)
        tokenize = tokenize or self._tokenize
        if len(text) <= SHORT_TEXT:
            return tokenize(text)
        if len(text) <= LONG_TEXT:
            return await asyncio.to_thread(tokenize, text)
        return await asyncio.get_running_loop().run_in_executor(self._one_by_one, tokenize, text)
