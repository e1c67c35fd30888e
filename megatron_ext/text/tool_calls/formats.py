"""Formats of tool calls, one record for each family of models, and the grammars that guide calls in them.

Grammars are in llguidance's form of Lark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from megatron_ext.errors import ConfigError
from megatron_ext.text.reasoning import ReasoningFormat
from megatron_ext.text.tool_calls.functions import Function, GrammarRules
from megatron_ext.text.tool_calls.json_calls import JsonCalls, MistralCalls
from megatron_ext.text.tool_calls.pythonic_calls import PythonicCalls
from megatron_ext.text.tool_calls.xml_calls import XmlCalls


@dataclass(frozen=True)
class ToolCallFormat:
    """Format in which a family of models writes tool calls.

    Attributes:
        name: Value of `--tool-call-parser`.
        syntax: Syntax of the calls between the markers. `parse` raises `NotACall` where a text is not in it; `grammar`
            gives the expression of one call, or of several if `is_parallel` and the syntax has lists of them.
        opening: Marker before the calls.
        closing: Marker after them; may be empty.
        bare: First characters of an answer that is a call without the opening marker; empty if every call has it.
        template: Text in chat templates of the family that no record before this one has.
        between: Text between calls that have markers of their own; None if all calls are between one pair.
    """

    name: str
    syntax: JsonCalls | MistralCalls | PythonicCalls | XmlCalls
    opening: str
    closing: str = ""
    bare: str = ""
    template: str = ""
    between: str | None = None


HERMES = ToolCallFormat(
    "hermes", JsonCalls(space="\n"), "<tool_call>", "</tool_call>", template="<tool_call>", between="\n"
)
# In the order in which templates are searched: several families' templates have <tool_call>.
FORMATS = (
    ToolCallFormat("qwen3_coder", XmlCalls(), "<tool_call>", "</tool_call>", template="<function=", between="\n"),
    ToolCallFormat("nemotron", JsonCalls(is_list=True), "<TOOLCALL>", "</TOOLCALL>", template="<TOOLCALL>"),
    ToolCallFormat("mistral", MistralCalls(), "[TOOL_CALLS]", template="[ARGS]", between=""),
    ToolCallFormat("mistral", MistralCalls(is_list=True), "[TOOL_CALLS]", template="[TOOL_CALLS]"),
    ToolCallFormat("lfm2", PythonicCalls(), "<|tool_call_start|>", "<|tool_call_end|>", template="<|tool_call_start|>"),
    ToolCallFormat("granite", JsonCalls(is_list=True), "<|tool_call|>", template="<|tool_call|>"),
    HERMES,
    ToolCallFormat(
        "llama3_json",
        JsonCalls(key="parameters", separator="; "),
        "<|python_tag|>",
        bare="{",
        template='"parameters": dictionary of argument name',
    ),
    ToolCallFormat("pythonic", PythonicCalls(), "<|python_start|>", "<|python_end|>", bare="[", template="[func_name"),
)
NAMES = tuple(dict.fromkeys(one.name for one in FORMATS))
_ANY_TEXT = "TEXT?"  # in a grammar


def format_named(name: str, template: str | None = None) -> ToolCallFormat:
    """Return the format of a name; if several have it, the chat template decides.

    Raises:
        ConfigError: The name is not known.
    """
    found = [one for one in FORMATS if one.name == name]
    if not found:
        raise ConfigError(f"there is no format {name!r} of tool calls; {', '.join(sorted(NAMES))} are known")
    return _shown(found, template) or found[-1]


def format_of(template: str | None) -> ToolCallFormat:
    """Return the format that a chat template shows; Hermes if it shows none."""
    return _shown(FORMATS, template) or HERMES


def _shown(given: Iterable[ToolCallFormat], template: str | None) -> ToolCallFormat | None:
    return next((one for one in given if template is not None and one.template in template), None)


@dataclass(frozen=True)
class AnswerFormat:
    """Format of an answer.

    Attributes:
        calls: Format of tool calls.
        functions: Functions that may be called.
        max_calls: Maximum number of calls that are read; 0 for no calls.
        reasoning: Markers of thinking; None if thinking is not separated.
        begins_inside: Whether the answer begins inside of thinking.
    """

    calls: ToolCallFormat = HERMES
    functions: tuple[Function, ...] = ()
    max_calls: int = 0
    reasoning: ReasoningFormat | None = None
    begins_inside: bool = False


def grammar_of(
    answer_format: AnswerFormat,
    token_of: Callable[[str], int | None],
    *,
    must_call: bool = False,
    schema: Mapping[str, object] | None = None,
) -> str:
    """Return the grammar of an answer.

    Args:
        answer_format: Format of the answer.
        token_of: See `GrammarRules`.
        must_call: Whether the answer is at least one call; it may be text otherwise.
        schema: JSON schema of an answer without calls; None for any text.
    """
    rules = GrammarRules(token_of)
    text = _ANY_TEXT if schema is None else rules.json(schema)
    answer = _calls(answer_format, rules, text, must_call=must_call) if answer_format.functions else text
    return rules.text(f"{_thinking(answer_format, rules)} {answer}".strip())


def _thinking(answer_format: AnswerFormat, rules: GrammarRules) -> str:
    reasoning = answer_format.reasoning
    if reasoning is None:
        return ""
    rest = rules.up_to(reasoning.closing)
    space = rules.add("/\\s*/")
    if answer_format.begins_inside:
        return f"{rest} {space}"
    # Without thinking there is no space, since the template writes none: the next prompt has the answer's blocks.
    return f"({space} {rules.marker(reasoning.opening)} {rest} {space})?"


def _calls(answer_format: AnswerFormat, rules: GrammarRules, text: str, *, must_call: bool) -> str:
    """Return the expression of an answer of calls, or else of a text."""
    call_format, is_parallel = answer_format.calls, answer_format.max_calls > 1
    # Of a function that is neither strict nor must be called, the arguments are any object.
    functions = [one if must_call or one.is_strict else Function(one.name) for one in answer_format.functions]
    calls = call_format.syntax.grammar(functions, rules, is_parallel=is_parallel)
    closing = rules.marker(call_format.closing) if call_format.closing and not call_format.bare else ""
    rest = rules.add(f"({calls}) {closing}")
    opened = rest if call_format.bare else f"{rules.marker(call_format.opening)} {rest}"
    repeats = call_format.between is not None and is_parallel
    block = rules.add(opened)
    several = f"{block} ({rules.literal(call_format.between or '')} {block})*" if repeats else block
    if must_call:
        return several
    if text != _ANY_TEXT:
        return f"({several} | {text})"
    if call_format.bare:
        bare = "\\" + call_format.bare
        other = rules.add(f"/[^{bare}\\s](.|\\n)*/")
        return f"({several} | {other})?"
    guided = f"{rules.up_to(call_format.opening)} {rest}"
    return f"({guided})* {text}" if repeats else f"({guided})? {text}"
