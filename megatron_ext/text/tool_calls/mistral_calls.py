"""Calls of Mistral's models: weather[ARGS]{"city": "Oslo"}, or in older models a list of JSON objects."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ext.text.tool_calls.events import CallBegun
from megatron_ext.text.tool_calls.functions import Function, GrammarRules
from megatron_ext.text.tool_calls.json_calls import JsonCalls, json_arguments
from megatron_ext.text.tool_calls.source import NotACall, Parser, Source

_ID, _ARGUMENTS = "[CALL_ID]", "[ARGS]"
_LIST = JsonCalls(is_list=True)


@dataclass(frozen=True)
class MistralCalls:
    """Syntax of one call as a name and its arguments, or of a list of objects; both are read.

    Attributes:
        is_list: Whether the model writes a list.
    """

    is_list: bool = False

    def parse(self, source: Source, functions: dict[str, Function]) -> Parser:
        """Parse a call, or a list of calls. An id between name and arguments is dropped."""
        if (yield from source.skip_spaces()) == "[":
            yield from _LIST.parse(source, functions)
            return
        name = yield from source.word()
        if (yield from source.starts_with(_ID)):
            yield from source.word()
        yield from source.starts_with(_ARGUMENTS)
        if (yield from source.skip_spaces()) != "{":
            raise NotACall(name)
        source.check_name(name)
        yield CallBegun(name)
        yield from json_arguments(source)

    def grammar(self, functions: list[Function], rules: GrammarRules, *, is_parallel: bool) -> str:
        """Return the expression of a call or a list; arguments follow the functions' schemas."""
        if self.is_list:
            return _LIST.grammar(functions, rules, is_parallel=is_parallel)
        return " | ".join(
            f"{rules.literal(function.name)} {rules.marker(_ARGUMENTS)} {rules.json(function.schema)}"
            for function in functions
        )
