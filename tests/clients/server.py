"""Start `tools/run_server.py` with prescribed answers: the embedded model was not trained to call functions.

Before a grammar is compiled, the choices that a trained model would make are taken from it, so that what a client gets
depends on the conversation alone. With tools, an answer calls each function that may be called and was not called since
the user's last message, once each, in the order of `tools` and with the declared arguments only; functions that leave a
choice of arguments, such as an agent's shell, are not called. After that it is `TEXT`, or follows the response format.
Everything else (routes, chat template, tokens, masks, parsers, streams, errors) is the server as it is.

    python -m tests.clients.server --port 0
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_ext.config.request import LARK, ResponseFormat
from megatron_ext.server.openai import structured_output_checks
from megatron_ext.server.openai.chat import ChatFormat
from megatron_ext.server.openai.protocol import ChatRequest, Message, ToolChoice
from megatron_ext.text.tool_calls.formats import AnswerFormat, grammar_of
from megatron_ext.text.tool_calls.functions import GrammarRules
from tests.clients.expected import TEXT

constrained_format = structured_output_checks.constrained_format


def called(messages: Sequence[Message]) -> set[str]:
    """Return the names of the functions that were called since the user's last message."""
    since = messages[max((i for i, message in enumerate(messages) if message.role == "user"), default=0) :]
    return {str(call["function"]["name"]) for message in since for call in message.tool_calls or ()}


def leaves_no_choice(schema: Mapping[str, object]) -> bool:
    """Return whether each declared argument has one possible value."""
    arguments = schema.get("properties") or {}
    return all("const" in one or len(one.get("enum", ())) == 1 for one in arguments.values())


def prescribed_form(body: ChatRequest, form: AnswerFormat, chat: ChatFormat) -> ResponseFormat | None:
    """Return the response format of an answer without choices, in place of `constrained_format`."""
    if not form.functions:
        return constrained_format(body, form, chat)
    done = called(body.messages)
    given = tuple(replace(one, schema={**one.schema, "additionalProperties": False}) for one in form.functions)
    functions = tuple(one for one in given if one.name not in done and leaves_no_choice(one.schema))
    if body.tool_choice.mode == "required":
        functions = functions or given
    if not functions:
        body = body.model_copy(update={"tool_choice": ToolChoice("none")})
        answer = constrained_format(body, replace(form, functions=()), chat)
        return ResponseFormat(LARK, GrammarRules(chat.token_of).text(f'"{TEXT}"')) if answer is None else answer
    names = tuple(one.name for one in functions)
    body = body.model_copy(update={"tool_choice": ToolChoice("required", names)})
    return constrained_format(body, replace(form, functions=functions), chat)


def prescribed_grammar(
    answer: AnswerFormat, token_of: Callable[[str], int | None], *, must_call: bool = False, **options: Any
) -> str:
    """Return a grammar that calls each function once, or the first one where calls are not parallel."""
    if not must_call:
        return grammar_of(answer, token_of, **options)
    rules, form = GrammarRules(token_of), answer.calls
    functions = answer.functions if answer.max_calls > 1 else answer.functions[:1]
    opening, closing = rules.marker(form.opening), rules.marker(form.closing)
    calls = [form.syntax.grammar([one], rules, is_parallel=False) for one in functions]
    return rules.text(' "\\n" '.join(f"{opening} {call} {closing}" for call in calls))


def main(argv: Sequence[str]) -> int:
    """Serve; see `tools/run_server.py`."""
    structured_output_checks.constrained_format = prescribed_form
    structured_output_checks.grammar_of = prescribed_grammar
    from megatron_ext.commands import serve  # imports the routes, which take the functions of this module

    return serve.main(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
