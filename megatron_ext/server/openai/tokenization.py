"""Tokenization of texts in threads, or on the event loop if they are short.

Long texts are refused if they cannot fit, and otherwise tokenized one at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from megatron_ext.server.api_errors import text_too_long
from megatron_ext.text.tokenizer import TextTokenizer, Tokenizer

Result = TypeVar("Result")

# Characters. Tokenization takes hundreds of bytes a character: several longer texts at once would add up.
LONG_TEXT = 100_000
# Texts up to this length take less time than waking a thread while the engine's runs (some 0.3 ms).
SHORT_TEXT = 512


class TextEncoder:
    """Encoder of prompts.

    Args:
        tokenizer: Tokenizer of the model.
        tokenize: A text to ids; called in threads.
        longest_sequence: Maximum number of tokens of a prompt.
    """

    def __init__(self, tokenizer: Tokenizer, tokenize: Callable[[str], list[int]], longest_sequence: int) -> None:
        self._tokenize = tokenize
        # None: a token can stand for text of any length, as in prompts of ids separated by spaces.
        token = tokenizer.longest_token if isinstance(tokenizer, TextTokenizer) else None
        self._sequence = longest_sequence
        self._max = None if token is None else longest_sequence * token
        self._one_by_one = ThreadPoolExecutor(1, "long texts")

    async def encode(self, text: str, tokenize: Callable[[str], list[int]] | None = None) -> list[int]:
        """Return the ids of a text.

        Args:
            text: A prompt, or a rendered conversation.
            tokenize: Function used instead of the tokenizer alone.

        Raises:
            ApiError: The text is too long under any tokenization.
            ConfigError: The tokenizer cannot read the text.
        """
        return await self.run(text, tokenize or self._tokenize)

    async def run(self, text: str, tokenize: Callable[[str], Result]) -> Result:
        """Return the result of a function that tokenizes a text.

        Raises:
            ApiError: The text is too long under any tokenization.
            ConfigError: The tokenizer cannot read the text.
        """
        if self._max is not None and len(text) > self._max:
            raise text_too_long(len(text), self._max, self._sequence)
        if len(text) <= SHORT_TEXT:
            return tokenize(text)
        if len(text) <= LONG_TEXT:
            return await asyncio.to_thread(tokenize, text)
        return await asyncio.get_running_loop().run_in_executor(self._one_by_one, tokenize, text)
