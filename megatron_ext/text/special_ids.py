"""Tokens that begin and end a document, from the files of a tokenizer."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron_ext.errors import ConfigError
from megatron_ext.files import read_json

IdOf = Callable[[str], int | None]  # id of a token's text

# Sources of the end and beginning of a document, in this order; the last two hold ids, the others texts.
_TEXT_SOURCES = (("tokenizer_config.json", "{}_token"), ("special_tokens_map.json", "{}_token"))
_ID_SOURCES = (("generation_config.json", "{}_token_id"), ("config.json", "{}_token_id"))
# A bare tokenizer.json does not say which special token ends a document: these names are the usual ones.
_USUAL_ENDS = ("<|endoftext|>", "</s>", "<eos>", "<eod>")


@dataclass(frozen=True)
class SpecialIds:
    """Ids of the tokens around a document; None if absent. `ends` are all that end one, `eod` first."""

    eod: int | None = None
    bos: int | None = None
    ends: tuple[int, ...] = ()


def special_ids(directory: Path, id_of: IdOf) -> SpecialIds:
    """Return end and beginning of a document, from the tokenizer's files, else from the model's.

    If the model's files list several ends, all of them end a document, and if the tokenizer names none, the first one
    is `eod`. If no file names the end, a special token with a usual name is the end.

    Args:
        directory: Directory of the files.
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
    """Return the ids of a role from the first of the model's files that names any."""
    for file, key in _ID_SOURCES:
        value = _value(directory / file, key.format(role))
        ids = [one for one in (value if isinstance(value, list) else [value]) if type(one) is int]
        if ids:
            return ids
    return []


def _value(file: Path, key: str) -> object:
    return read_json(file).get(key) if os.path.lexists(file) else None
