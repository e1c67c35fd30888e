"""Functions that a model may call, and rules of the grammar that its calls follow."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from megatron_ext.text.grammars import DEFINITIONS, JSON_OPTIONS
from megatron_ext.text.patterns import ANY, literal, searched, with_patterns

# Arguments are spelled as `json.dumps` and the filter `tojson` of templates do, so that the next turn's prompt repeats
# the answer to the letter, and its tokens are found in the cache. Schemas of strict tools have been checked before.
_SPELLING = {"whitespace_pattern": "", "item_separator": ", ", "key_separator": ": "}
_OPTIONS = {**JSON_OPTIONS, **_SPELLING, "lenient": True}
ANY_OBJECT: Mapping[str, object] = {"type": "object"}


@dataclass(frozen=True)
class Function:
    """Function that a model may call.

    Attributes:
        name: Name.
        schema: JSON schema of the arguments.
        is_strict: Whether the arguments follow the schema where the model may also answer without a call.
    """

    name: str
    schema: Mapping[str, object] = field(default_factory=lambda: ANY_OBJECT)
    is_strict: bool = False

    @property
    def properties(self) -> Mapping[str, Mapping[str, object]]:
        """Schemas of the arguments by name; empty if the schema declares none."""
        found = self.schema.get("properties")
        return {key: one for key, one in found.items() if isinstance(one, dict)} if isinstance(found, dict) else {}

    @property
    def required(self) -> frozenset[str]:
        """Names of the arguments that a call must have."""
        found = self.schema.get("required")
        return frozenset(found) if isinstance(found, list) else frozenset()

    def schema_of(self, name: str) -> Mapping[str, object]:
        """Return the schema of one argument, with the definitions that it may refer to."""
        shared = {key: self.schema[key] for key in DEFINITIONS if key in self.schema}
        return {**shared, **self.properties[name]}


class GrammarRules:
    """Rules of a grammar in llguidance's form of Lark.

    Args:
        token_of: Returns the id of the single token that a text is; None if it is several.
    """

    def __init__(self, token_of: Callable[[str], int | None]) -> None:
        self._token_of = token_of
        self._rules: list[str] = []

    def literal(self, text: str) -> str:
        """Return the expression of a text."""
        return json.dumps(text, ensure_ascii=False)

    def marker(self, text: str) -> str:
        """Return the expression of a marker: its token, or its text."""
        token = self._token_of(text)
        return self.literal(text) if token is None else f"<[{token}]>"

    def json(self, schema: Mapping[str, object]) -> str:
        """Return the name of a rule for JSON of a schema."""
        converted = with_patterns({**schema, "x-guidance": _OPTIONS})
        text = json.dumps(converted, ensure_ascii=False)
        return self.add(f"%json {text}")

    def add(self, expression: str, options: str = "") -> str:
        """Add a rule; return its name."""
        name = f"rule{len(self._rules)}"
        self._rules.append(f"{name}{options}: {expression}")
        return name

    def up_to(self, marker: str) -> str:
        """Return the expression of any text up to a marker, and the marker."""
        token = self._token_of(marker)
        return f"TEXT? <[{token}]>" if token is not None else self.add("TEXT", f"[suffix={self.literal(marker)}]")

    def string_up_to(self, marker: str, schema: Mapping[str, object]) -> str:
        """Return the expression of a text of a schema's pattern and lengths up to a marker, and the marker."""
        pattern, least, most = (schema.get(key) for key in ("pattern", "minLength", "maxLength"))
        parts = [f"/({searched(pattern)})/"] if isinstance(pattern, str) else []
        if isinstance(least, int) or isinstance(most, int):
            parts.append(f"/(?s:.){{{least or 0},{'' if most is None else most}}}/")
        if not parts:
            return self.up_to(marker)
        name = f"TEXT{len(self._rules)}"
        self._rules.append(f"{name}: {' & '.join((*parts, f'~/{ANY}{literal(marker)}{ANY}/'))}")
        return self.add(name, f"[suffix={self.literal(marker)}]")

    def text(self, start: str) -> str:
        """Return the grammar, whose first rule is `start`."""
        return "\n".join((f"start: {start}", *self._rules, "TEXT: /(.|\\n)*/", ""))
