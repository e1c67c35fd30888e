"""Synthetic conversations with tool calls and thinking, made deterministically.

A conversation is drawn from its number alone. Names of functions and values of arguments are split by their hash: those
of the held-out side are in no training conversation, so a model can only have them right by copying them from the
prompt. Names and texts of the documentation come from the documents of the same side.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from examples.embedded_model.corpus import SYSTEM_PROMPTS, Document, first_paragraph, is_answer, name_hash
from examples.embedded_model.words import CITIES, ENDINGS, KEYS, NOUNS, PEOPLE, SKIES, STATES, VERBS, WORDS
from megatron_ext.text.chat_template import ChatOptions, render_chat

Message = dict[str, object]
Values = Mapping[str, object]
Value = TypeVar("Value")

HELD_OUT_VALUE_ONE_IN = 8
TOOL_COUNTS = (1, 1, 1, 2, 2, 3)
THINKING_ONE_IN = 4
SYSTEM_ONE_IN = 3
SMALL_TALK_ONE_IN = 12
LONGEST_RESULT = 160  # characters
FEW_NAMES = 100  # tries, after which a function's name gets a number


@dataclass(frozen=True)
class Tool:
    """A function with the fields of its schema, in OpenAI's form."""

    name: str
    description: str
    properties: Mapping[str, str]  # type of each

    @property
    def schema(self) -> Message:
        """Description that a chat template is given."""
        properties = {name: {"type": kind} for name, kind in self.properties.items()}
        parameters = {"type": "object", "properties": properties, "required": list(properties)}
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": parameters},
        }


@dataclass(frozen=True)
class Turn:
    """A question, the call that answers it, what the function returns, and the answer."""

    tool: Tool
    question: str
    arguments: Values
    result: str
    answer: str
    thought: str

    @property
    def call(self) -> Message:
        """The assistant's message with the call."""
        function = {"name": self.tool.name, "arguments": dict(self.arguments)}
        return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


@dataclass(frozen=True)
class Exchange:
    """A prompt that a call must follow.

    Attributes:
        tools: Functions in the prompt.
        messages: Conversation up to the question.
        turn: What is asked.
    """

    tools: tuple[Tool, ...]
    messages: tuple[Message, ...]
    turn: Turn

    @property
    def expected(self) -> tuple[str, dict[str, object]]:
        """Name and arguments of the right call."""
        return self.turn.tool.name, dict(self.turn.arguments)

    @property
    def result(self) -> str:
        """Text that the function returns."""
        return self.turn.result


def is_held_out_value(value: str) -> bool:
    """Return whether a function's name or an argument is on the held-out side."""
    return name_hash(f"tool {value}") % HELD_OUT_VALUE_ONE_IN == 0


class Draw:
    """Random parts of one conversation, all of one side of the split.

    Args:
        seed: What the parts depend on.
        entries: Names of the documentation and first paragraphs about them.
        held_out: The side.
    """

    def __init__(self, seed: str, entries: Sequence[tuple[str, str]], *, held_out: bool) -> None:
        self.random = random.Random(name_hash(seed))
        self._entries = entries
        self._held_out = held_out

    def one(self, values: Sequence[Value]) -> Value:
        """Return one of the values, whatever its side."""
        return values[int(self.random.random() * len(values))]

    def below(self, count: int) -> int:
        """Return a number from 0 to `count - 1`."""
        return int(self.random.random() * count)

    def ours(self, make: Callable[[], str]) -> str:
        """Return the first of the made values that is on this side."""
        while is_held_out_value(found := make()) != self._held_out:
            pass
        return found

    def entry(self) -> tuple[str, str]:
        """Return a documented name and the first paragraph about it."""
        return self._entries[self.below(len(self._entries))]

    def name(self, *names: str) -> str:
        """Return the name of a function, in one of its usual spellings."""
        tries = itertools.count()

        def make() -> str:
            name = self.one(names)
            if (number := next(tries)) >= FEW_NAMES:
                return f"{name}_{number}"
            style = self.below(8)
            if style == 0:
                first, *others = name.split("_")
                return first + "".join(other.capitalize() for other in others)
            if style == 1:
                return f"{name}_{self.one(('by', 'for', 'now', 'v2', 'tool', 'info'))}"
            return name

        return self.ours(make)

    def code(self) -> str:
        """Return an identifier such as of an order."""
        kinds = (
            lambda: f"{chr(65 + self.below(26))}{10 + self.below(990)}",
            lambda: str(100 + self.below(9900)),
            lambda: f"{self.one(WORDS)}-{1 + self.below(99)}",
            lambda: f"{self.one(WORDS)}_{self.one(WORDS)}",
            lambda: f"{chr(65 + self.below(26))}{chr(65 + self.below(26))}-{100 + self.below(900)}",
            lambda: self.one(PEOPLE),
            lambda: f"{self.one(WORDS)} {self.one(WORDS)}",
        )
        return self.ours(kinds[self.below(len(kinds))])


def documentation(draw: Draw) -> Turn:
    """A look-up of a name of the standard library."""
    key = draw.one(("name", "query", "symbol", "topic", "function"))
    names = ("lookup", "look_up", "search_docs", "find_docs", "get_docs", "describe", "get_documentation", "help_on")
    tool = Tool(draw.name(*names), draw.one(("Documentation of a name", "Look up a Python name")), {key: "string"})
    name, text = draw.entry()
    question = draw.one(
        ("What does {} do?", "Look up {}.", "What is {}?", "Find the documentation of {}.", "Please describe {}.")
    ).format(name)
    return Turn(tool, question, {key: name}, text, text, f"I need the documentation of {name}.")


def weather(draw: Draw) -> Turn:
    """The weather of a city."""
    key = draw.one(("city", "city", "location", "place", "town"))
    names = ("get_weather", "weather", "current_weather", "check_weather", "find_weather", "weather_report")
    tool = Tool(
        draw.name(*names), draw.one(("Weather of a city", "Current weather", "Get the weather")), {key: "string"}
    )
    city, sky, degrees = draw.ours(lambda: draw.one(CITIES)), draw.one(SKIES), draw.below(35)
    question = draw.one(
        ("What is the weather in {}?", "How is the weather in {} today?", "Is it cold in {}?", "Weather in {}, please.")
    ).format(city)
    result = json.dumps({"sky": sky, "degrees": degrees})
    answer = f"It is {sky} in {city}, with {degrees} degrees."
    return Turn(tool, question, {key: city}, result, answer, f"I need the weather of {city}.")


def clock(draw: Draw) -> Turn:
    """The time of a city."""
    key = draw.one(("city", "zone", "place", "timezone"))
    names = ("get_time", "current_time", "local_time", "clock", "time_in")
    tool = Tool(draw.name(*names), draw.one(("Time of a zone", "Current time", "Get the time")), {key: "string"})
    city, time = draw.ours(lambda: draw.one(CITIES)), f"{draw.below(24)}:{10 + draw.below(50)}"
    question = draw.one(("What time is it in {}?", "Tell me the time in {}.", "How late is it in {}?")).format(city)
    answer = f"It is {time} in {city}."
    return Turn(tool, question, {key: city}, json.dumps({"time": time}), answer, f"I need the time in {city}.")


def file(draw: Draw) -> Turn:
    """The text of a file."""
    key = draw.one(("path", "path", "file", "filename"))
    names = ("read_file", "open_file", "show_file", "cat", "get_file", "view_file")
    tool = Tool(draw.name(*names), draw.one(("Read a file", "Text of a file")), {key: "string"})

    def make() -> str:
        parts = [draw.one(WORDS) for _ in range(1 + draw.below(3))]
        return f"{'/'.join(parts)}.{draw.one(ENDINGS)}"

    path, (_, text) = draw.ours(make), draw.entry()
    question = draw.one(("What is in {}?", "Read {}.", "Show me {}.", "Open {} and tell me what it says.")).format(path)
    return Turn(tool, question, {key: path}, text, f"{path} says: {text}", f"I have to read {path}.")


def sum_(draw: Draw) -> Turn:
    """An operation on two numbers."""
    operation, sign = (("add", "plus"), ("subtract", "minus"), ("multiply", "times"))[draw.below(3)]
    a, b = draw.below(100), draw.below(100)
    left, right = draw.one((("a", "b"), ("x", "y"), ("left", "right")))
    kind = "integer"
    tool = Tool(
        draw.name(operation, f"{operation}_numbers"), f"{operation.capitalize()} two numbers", {left: kind, right: kind}
    )
    value = {"add": a + b, "subtract": a - b, "multiply": a * b}[operation]
    question = draw.one(("What is {} {} {}?", "Compute {} {} {}.", "How much is {} {} {}?")).format(a, sign, b)
    answer = f"{a} {sign} {b} is {value}."
    return Turn(tool, question, {left: a, right: b}, str(value), answer, f"I have to {operation} {a} and {b}.")


def message(draw: Draw) -> Turn:
    """A message to a person."""
    keys = draw.one((("to", "text"), ("name", "message"), ("recipient", "text"), ("to", "body")))
    names = ("send_message", "send_mail", "send", "notify", "write_to")
    tool = Tool(
        draw.name(*names), draw.one(("Send a message", "Send a message to a person")), dict.fromkeys(keys, "string")
    )
    person = draw.ours(lambda: draw.one(PEOPLE))
    text = draw.ours(lambda: " ".join(draw.one(WORDS) for _ in range(2 + draw.below(3))))
    question = draw.one(('Send "{1}" to {0}.', 'Write "{1}" to {0}.', 'Please send {0} the message "{1}".')).format(
        person, text
    )
    answer = f'I sent "{text}" to {person}.'
    return Turn(
        tool, question, dict(zip(keys, (person, text), strict=True)), "sent", answer, f"The message is for {person}."
    )


def lookup(draw: Draw) -> Turn:
    """A function of any name about a thing of any kind, the most frequent one."""
    verb, noun, key = draw.one(VERBS), draw.one(NOUNS), draw.one(KEYS)
    key = key if draw.below(2) else f"{noun}_{key}"
    name = draw.name(f"{verb}_{noun}", f"{noun}_{verb}", f"{verb}_{noun}", f"{verb}_the_{noun}")
    article = draw.one(("a", "the"))
    tool = Tool(name, f"{verb.capitalize()} {article} {noun}", {key: "string"})
    code, state = draw.code(), draw.one(STATES)
    question = draw.one(
        ("{0} the {1} {2}.", "Please {3} the {1} {2}.", "Can you {3} {1} {2}?", "{0} {1} {2}, please.")
    ).format(verb.capitalize(), noun, code, verb)
    field = draw.one(("status", "state", "result"))
    answer = f"The {noun} {code} is {state}."
    return Turn(tool, question, {key: code}, json.dumps({field: state}), answer, f"I have to {verb} the {noun} {code}.")


KINDS = (documentation, documentation, weather, weather, clock, file, sum_, message, lookup, lookup, lookup, lookup)
SMALL_TALK = (
    ("Hello.", "Hello. What can I do for you?"),
    ("Good morning.", "Good morning. What can I do for you?"),
    ("Thank you.", "You are welcome."),
    ("Thanks, that is all.", "You are welcome. Good bye."),
)


def entries(documents: Sequence[Document]) -> list[tuple[str, str]]:
    """Return documented names, with the short first paragraphs about them."""
    found = [(entry.name, first_paragraph(entry.text)) for document in documents for entry in document.entries]
    return [(name, text) for name, text in found if is_answer(text) and len(text) <= LONGEST_RESULT and " " not in name]


def _turns(draw: Draw) -> tuple[tuple[Tool, ...], list[Turn]]:
    """Return functions of different names, in random order, and turns that call some of them."""
    turns: list[Turn] = []
    count = draw.one(TOOL_COUNTS)
    while len(turns) < count:
        turn = KINDS[draw.below(len(KINDS))](draw)
        if all(turn.tool.name != other.tool.name for other in turns):
            turns.append(turn)
    tools = [turn.tool for turn in turns]
    draw.random.shuffle(tools)
    return tuple(tools), turns


def system_message(draw: Draw) -> list[Message]:
    """Return one of the usual system messages, or none in most conversations."""
    return [{"role": "system", "content": draw.one(SYSTEM_PROMPTS)}] if draw.below(SYSTEM_ONE_IN) == 0 else []


def conversation(number: int, entries: Sequence[tuple[str, str]]) -> tuple[list[Message], tuple[Tool, ...]]:
    """Return the messages and functions of a training conversation."""
    draw = Draw(f"conversation {number}", entries, held_out=False)
    tools, turns = _turns(draw)
    thinks = draw.below(THINKING_ONE_IN) == 0
    messages = system_message(draw)
    for turn in turns[: 1 + draw.below(2)]:
        if draw.below(SMALL_TALK_ONE_IN) == 0:
            question, answer = SMALL_TALK[draw.below(len(SMALL_TALK))]
            messages += [
                {"role": "user", "content": question},
                answer_message(answer, "No function is needed.", thinks),
            ]
        call = turn.call | ({"reasoning_content": f"{turn.thought} I call {turn.tool.name}."} if thinks else {})
        messages += [
            {"role": "user", "content": turn.question},
            call,
            {"role": "tool", "content": turn.result},
            answer_message(turn.answer, f"This is what {turn.tool.name} says.", thinks),
        ]
    return messages, tools


def answer_message(text: str, thought: str, thinks: bool) -> Message:
    """Return the assistant's message, with its thought if it thinks."""
    message: Message = {"role": "assistant", "content": text}
    return message | ({"reasoning_content": thought} if thinks else {})


def rendered(template: str, messages: Sequence[Message], tools: Sequence[Tool]) -> str:
    """Return the text of a whole conversation."""
    options = ChatOptions(add_generation_prompt=False, tools=tuple(tool.schema for tool in tools))
    return render_chat(template, messages, {}, options)


def rendered_result(template: str, exchange: Exchange) -> str:
    """Return the prompt that ends with the function's result."""
    options = ChatOptions(tools=tuple(tool.schema for tool in exchange.tools))
    result: Message = {"role": "tool", "content": exchange.result}
    return render_chat(template, [*exchange.messages, exchange.turn.call, result], {}, options)


def held_out_exchanges(documents: Sequence[Document], count: int) -> Iterator[Exchange]:
    """Prompts whose function names and arguments are in no training conversation.

    Args:
        documents: Those of the held-out side.
        count: Number of prompts.
    """
    known = entries(documents)
    for number in range(count):
        draw = Draw(f"held out {number}", known, held_out=True)
        tools, (turn, *_) = _turns(draw)
        question: Message = {"role": "user", "content": turn.question}
        yield Exchange(tools, (*system_message(draw), question), turn)
