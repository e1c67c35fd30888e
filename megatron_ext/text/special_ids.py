"""Which tokens end and begin a document, as the files beside a tokenizer say it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron_ext.errors import ConfigError
from megatron_ext.files import read_json

IdOf = Callable[[str], int | None]  # of a token by its text

# Read for end and beginning of a document, in this order; the last two hold ids, the others texts.
_TEXT_SOURCES = (("tokenizer_config.json", "{}_token"), ("special_tokens_map.json", "{}_token"))
_ID_SOURCES = (("generation_config.json", "{}_token_id"), ("config.json", "{}_token_id"))
# A bare tokenizer.json does not say which of its special tokens ends a document: these names do, everywhere we know.
_USUAL_ENDS = ("<|endoftext|>", "</s>", "<eos>", "<eod>")


@dataclass(frozen=True)
class SpecialIds:
    """Ids of the tokens around a document; None where there is none. `ends` are all that end one, `eod` first."""

    eod: int | None = None
    bos: int | None = None
    ends: tuple[int, ...] = ()


def special_ids(directory: Path, id_of: IdOf) -> SpecialIds:
    """End and beginning of a document, from the tokenizer's files, else from the model's.

    Where the model's files list several ends, all of them end a document, and where the tokenizer's name none the first
    one is `eod`. Without any word on the end, a special token with a usual name is it.

    Args:
        directory: Where the files are.
        id_of: Text of a token to its id, or None.

    Raises:
        ConfigError: A file names a token that the tokenizer does not have.
    """
    eod = _named_id(directory, "eos", id_of)
    if eod is None:
        eod = next((found for name in _USUAL_ENDS if (found := id_of(name)) is not None), None)
    ends = () if eod is None else tuple(dict.fromkeys((eod, *_listed_ids(directory, "eos"))))
    return SpecialIds(eod, _named_id(directory, "bos", id_of), ends)


def _named_id(directory: Path, role: str, id_of: IdOf) -> int | None:
    for file, key in _TEXT_SOURCES:
        token = _value(directory / file, key.format(role))
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str) and token:
            found = id_of(token)
            if found is None:
                raise ConfigError(f"{directory / file}: {key.format(role)} {token!r} is not in the vocabulary")
            return found
    return next(iter(_listed_ids(directory, role)), None)


def _listed_ids(directory: Path, role: str) -> list[int]:
    """What the first of the model's files that says anything says: one id or several."""
    for file, key in _ID_SOURCES:
        value = _value(directory / file, key.format(role))
        ids = [one for one in (value if isinstance(value, list) else [value]) if type(one) is int]
        if ids:
            return ids
    return []


def _value(file: Path, key: str) -> object:
    return read_json(file).get(key) if os.path.lexists(file) else None
