"""Prompts of library callers as token ids, checked completely before any of them is submitted."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Protocol, SupportsIndex, TypeAlias, TypeGuard

from megatron_ext.config import RequestParams
from megatron_ext.errors import ConfigError
from megatron_ext.scheduling.record import RequestRecord
from megatron_ext.scheduling.request_inputs import RequestInputs
from megatron_ext.text.grammars import Grammars
from megatron_ext.text.tokenizer import Tokenizer, tokenize_prompt
from megatron_ext.text.vocabulary import Vocabulary

_LONGEST_SHOWN = 60  # characters


class TokenArray(Protocol):
    """Array of token ids, such as a torch tensor or a numpy array."""

    def tolist(self) -> object:
        """Return nested lists of Python numbers."""


Prompt: TypeAlias = str | Sequence[SupportsIndex] | TokenArray | RequestRecord  # a text, token ids, or to continue
Prompts: TypeAlias = Prompt | Iterable[Prompt]  # one, or several
ParamsForAll: TypeAlias = RequestParams | Sequence[RequestParams] | None  # for all, or one for each; None: defaults


class PromptReader:
    """Reader of prompts for one model; thread-safe.

    Args:
        grammars: The engine's grammar compiler: response formats are compiled here once, outside its thread.
        defaults: Parameters of a prompt without its own.
    """

    def __init__(
        self, tokenizer: Tokenizer, vocabulary: Vocabulary, grammars: Grammars, defaults: RequestParams
    ) -> None:
        self._vocabulary = vocabulary
        self._grammars = grammars
        self._tokenizer = tokenizer
        self._defaults = defaults

    def read_all(self, prompts: Prompts, params: ParamsForAll) -> list[RequestInputs]:
        """Return one prompt or several, each with its parameters.

        Raises:
            ConfigError: A prompt is invalid; the error names the prompt and the reason.
        """
        read = [self._read(prompt, f"prompt {index}") for index, prompt in enumerate(_listed(prompts))]
        settings = self._params_of_each(params, [continued for *_, continued in read])
        return [
            RequestInputs(tokens, own, text, continued)
            for (tokens, text, continued), own in zip(read, settings, strict=True)
        ]

    def read_one(self, prompt: Prompt, params: RequestParams | None) -> RequestInputs:
        """Return one prompt.

        Raises:
            ConfigError: The value is not a prompt, or several.
        """
        several = _listed(prompt)
        if len(several) != 1 or (several[0] is not prompt and not _is_array(prompt)):
            raise ConfigError(f"{_shown(prompt)} is not one prompt; give a text or token ids, several to generate()")
        tokens, text, continued = self._read(several[0], "the prompt")
        return RequestInputs(tokens, self._checked(params, continued), text, continued)

    def _read(self, prompt: object, where: str) -> tuple[tuple[int, ...], str | None, RequestRecord | None]:
        """Return the token ids of a prompt, its text if it has one, and the record whose output it continues."""
        text = prompt if isinstance(prompt, str) else None
        if isinstance(prompt, RequestRecord):
            return prompt.prompt_tokens, prompt.prompt_text, prompt
        try:
            tokens = self._tokens(prompt) if text is None else self._tokenized(text)
            self._vocabulary.check_prompt(tokens)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
        return tokens, text, None

    def _tokenized(self, text: str) -> tuple[int, ...]:
        if not text:
            raise ConfigError("it is empty; give at least one character")
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise ConfigError(f"{_shown(text)} has half of a surrogate pair, which is not a character")
        tokens = tuple(tokenize_prompt(self._tokenizer, text))
        if not tokens:
            raise ConfigError(f"the tokenizer returns no token for {_shown(text)}; give a longer text")
        return tokens

    def _tokens(self, prompt: object) -> tuple[int, ...]:
        ids = prompt.tolist() if _is_array(prompt) else prompt
        if not isinstance(ids, Sequence) or isinstance(ids, bytes | bytearray):
            raise ConfigError(f"{_with_type(prompt)}; give a text or a list of token ids")
        if not ids:
            raise ConfigError("it has no token; give at least one")
        wrong = next((one for one in ids if not _is_number(one)), None)
        if wrong is not None:
            raise ConfigError(f"{_shown(wrong)} is not a token id; give whole numbers")
        return tuple(map(operator.index, ids))

    def _params_of_each(self, params: ParamsForAll, records: Sequence[RequestRecord | None]) -> list[RequestParams]:
        if params is None or isinstance(params, RequestParams):
            return [self._checked(params, continued) for continued in records]
        if not isinstance(params, Sequence) or isinstance(params, str):
            return [self._checked(params)]  # raises
        if len(params) != len(records):
            raise ConfigError(
                f"{len(params)} RequestParams for {len(records)} prompts; give one for all, or one for each"
            )
        return [self._checked(one) for one in params]

    def _checked(self, params: object, continued: RequestRecord | None = None) -> RequestParams:
        if params is None:
            params = self._defaults if continued is None else continued.params or self._defaults
        if not isinstance(params, RequestParams):
            raise ConfigError(
                f"{_with_type(params)}; give RequestParams(...), as in RequestParams(num_tokens_to_generate=30)"
            )
        self._grammars.check(params.response_format)
        return params


def _listed(prompts: object) -> list[object]:
    """Return a list of prompts; a text is one prompt, and so is a sequence of numbers.

    Raises:
        ConfigError: The value is neither a prompt nor a list of prompts.
    """
    if isinstance(prompts, str | RequestRecord):
        return [prompts]
    items = prompts.tolist() if _is_array(prompts) else prompts
    if isinstance(items, bytes | bytearray | dict) or not isinstance(items, Iterable):
        raise ConfigError(f"{_with_type(prompts)}; give a text, a list of token ids, or a list of those")
    several = list(items)
    if several and all(map(_is_number, several)):
        return [prompts if isinstance(prompts, Sequence) else several]
    number = next((index for index, one in enumerate(several) if _is_number(one)), None)
    if number is not None:
        raise ConfigError(
            f"prompt {number} is the number {several[number]} among prompts; give token ids as a list, as in "
            f"[{several[number]}]"
        )
    return several


def _is_array(value: object) -> TypeGuard[TokenArray]:
    return callable(getattr(value, "tolist", None))


def _is_number(value: object) -> bool:
    """Return whether the value is an integer of Python, numpy or torch, booleans excluded."""
    return hasattr(value, "__index__") and not isinstance(value, bool) and getattr(value, "ndim", 0) == 0


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[: _LONGEST_SHOWN - 3]}..."


def _with_type(value: object) -> str:
    return f"{_shown(value)} is of type {type(value).__name__}"
