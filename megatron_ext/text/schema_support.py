"""Parts of JSON schemas that the grammar library does not support: found by name, or left out."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from megatron_ext.text.grammars import JSON_OPTIONS, MAX_COMPILED, compilation_reason
from megatron_ext.text.patterns import with_patterns

_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_DATA = frozenset({"enum", "const", "default", "example", "examples", "required", "type"})
_DEFINITIONS = ("$defs", "definitions")


@dataclass(frozen=True)
class Unsupported:
    """Part of a schema that is not supported.

    Attributes:
        path: Place in the schema, such as `properties.a.format`.
        value: Value of the keyword there.
        reason: Reason of the library.
    """

    path: str
    value: object
    reason: str

    def __str__(self) -> str:
        shown = json.dumps(self.value, ensure_ascii=True)
        return f"{self.path or 'the schema'}: {shown if len(shown) <= 60 else shown[:57] + '...'} ({self.reason})"


def supported_part(schema: Mapping[str, object]) -> tuple[Mapping[str, object], Sequence[Unsupported]]:
    """Return a schema of an object without the keywords that are not supported, and these."""
    return _supported_part(json.dumps(schema))


@lru_cache(MAX_COMPILED)
def _supported_part(source: str) -> tuple[Mapping[str, Any], Sequence[Unsupported]]:
    schema = json.loads(source)
    if not _error(schema):
        return schema, []
    found: list[Unsupported] = []
    definitions = {key: schema[key] for key in _DEFINITIONS if key in schema}
    root = {**schema, **_kept(definitions, schema, (), found)}
    kept = _kept(root, root, (), found)
    error = _error(kept)
    if error:
        found.append(Unsupported("", schema, error))
        kept = {}
    return {"type": "object", **kept}, found


def _kept(node: Mapping[str, Any], root: Mapping[str, Any], path: tuple[str, ...], found: list[Unsupported]) -> Any:
    """Return a part of a schema without unsupported keywords: first in the schemas inside, then its own."""
    kept = {
        key: _mapped(key, value, lambda inner, one: _kept(one, root, (*path, *inner), found))
        for key, value in node.items()
    }
    shell = {
        key: value if key == "oneOf" else _mapped(key, value, lambda inner, one: {}) for key, value in kept.items()
    }
    if "$ref" in shell and _resolves(root, shell["$ref"]):
        del shell["$ref"]
    shared = {key: root[key] for key in _DEFINITIONS if key in root} if "oneOf" in shell else {}
    if not _error(shared | shell):
        return kept
    faults = {key: error for key, value in shell.items() if (error := _error(shared | {key: value}))}
    if not faults:  # keywords contradict each other
        found.append(Unsupported(".".join(path), node, _error(shared | shell)))
        return {}
    found += [Unsupported(".".join((*path, key)), node[key], error) for key, error in faults.items()]
    options = {"anyOf": kept["oneOf"]} if "oneOf" in faults and "anyOf" not in kept else {}
    return {key: value for key, value in kept.items() if key not in faults} | options


def _mapped(key: str, value: Any, change: Callable[[tuple[str, ...], dict[str, Any]], Any]) -> Any:
    """Return the value of a keyword whose inner schemas are changed."""
    if isinstance(value, dict) and key in _NAMED:
        return {name: change((key, name), one) if isinstance(one, dict) else one for name, one in value.items()}
    if isinstance(value, dict) and key not in _DATA:
        return change((key,), value)
    if isinstance(value, list) and key not in _DATA:
        return [change((key, str(i)), one) if isinstance(one, dict) else one for i, one in enumerate(value)]
    return value


def _resolves(root: Mapping[str, Any], reference: object) -> bool:
    """Return whether a reference is to a part of the schema."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return False
    place: Any = root
    for key in _keys(reference[1:]):
        if isinstance(place, list) and key.isdecimal() and int(key) < len(place):
            place = place[int(key)]
        elif isinstance(place, dict) and key in place:
            place = place[key]
        else:
            return False
    return True


def _keys(pointer: str) -> Iterator[str]:
    for key in pointer.split("/")[1:]:
        yield key.replace("~1", "/").replace("~0", "~")


def _error(schema: Mapping[str, Any]) -> str:
    """Return the library's reason against a schema; empty if it is supported."""
    from llguidance import LLMatcher

    source = json.dumps(with_patterns(schema))
    grammar = LLMatcher.grammar_from_json_schema(source, overrides=JSON_OPTIONS)  # type: ignore[arg-type]
    reason = compilation_reason(LLMatcher.validate_grammar(grammar)).partition("\n")[0]
    return reason.partition(":  (")[0]  # an expression of the library's own follows
