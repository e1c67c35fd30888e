"""Grammars that guide tool calls, in llguidance's form of Lark."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megatron_ext.text.tool_calls.formats import ToolCallFormat
from megatron_ext.text.tool_calls.functions import ANY_OBJECT, Function, GrammarRules


@dataclass(frozen=True)
class Guidance:
    """Demands on an answer.

    Attributes:
        functions: Functions that may be called; empty if none may.
        must_call: Whether the answer is at least one call; it may be text otherwise.
        is_parallel: Whether there may be several calls.
        answer: JSON schema of an answer without calls; None for any text.
        thinking: Marker that ends thinking, which precedes the answer; None without thinking.
        has_begun_thinking: Whether the prompt ends inside of thinking.
        thinking_opening: Marker that begins thinking.
    """

    functions: Sequence[Function] = ()
    must_call: bool = False
    is_parallel: bool = True
    answer: Mapping[str, object] | None = None
    thinking: str | None = None
    has_begun_thinking: bool = False
    thinking_opening: str = ""


def grammar_of(guidance: Guidance, call_format: ToolCallFormat, token_of: Callable[[str], int | None]) -> str:
    """Return the grammar of an answer.

    Args:
        guidance: Demands on the answer.
        call_format: Format of the calls.
        token_of: See `GrammarRules`.
    """
    rules = GrammarRules(token_of)
    answer = _answer(guidance, call_format, rules)
    return rules.text(f"{_thinking(guidance, rules)} {answer}".strip())


def _thinking(guidance: Guidance, rules: GrammarRules) -> str:
    if guidance.thinking is None:
        return ""
    rest = rules.up_to(guidance.thinking)
    space = rules.add("/\\s*/")
    if guidance.has_begun_thinking:
        return f"{rest} {space}"
    # Without thinking there is no space, since the template writes none: the next prompt has the answer's blocks.
    return f"({space} {rules.marker(guidance.thinking_opening)} {rest} {space})?"


def _answer(guidance: Guidance, call_format: ToolCallFormat, rules: GrammarRules) -> str:
    text = "TEXT?" if guidance.answer is None else rules.json(guidance.answer)
    if not guidance.functions:
        return text
    functions = [_guided(one, guidance) for one in guidance.functions]
    calls = call_format.syntax.grammar(functions, rules, is_parallel=guidance.is_parallel)
    closing = rules.marker(call_format.closing) if call_format.closing and not call_format.bare else ""
    rest = rules.add(f"({calls}) {closing}")
    opened = rest if call_format.bare else f"{rules.marker(call_format.opening)} {rest}"
    repeats = call_format.between is not None and guidance.is_parallel
    block = rules.add(opened)
    several = f"{block} ({rules.literal(call_format.between or '')} {block})*" if repeats else block
    if guidance.must_call:
        return several
    if guidance.answer is not None:
        return f"({several} | {text})"
    if call_format.bare:
        bare = "\\" + call_format.bare
        other = rules.add(f"/[^{bare}\\s](.|\\n)*/")
        return f"({several} | {other})?"
    guided = f"{rules.up_to(call_format.opening)} {rest}"
    return f"({guided})* TEXT?" if repeats else f"({guided})? TEXT?"


def _guided(function: Function, guidance: Guidance) -> Function:
    """Return the function with the schema that its arguments have to follow."""
    return function if guidance.must_call or function.is_strict else Function(function.name, ANY_OBJECT)
