"""Conversations without functions, with thinking and without, and the synthetic text of a training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from examples.embedded_model.conversations import (
    KINDS,
    SMALL_TALK,
    THINKING_ONE_IN,
    Draw,
    Message,
    answer_message,
    conversation,
    documentation,
    entries,
    rendered,
    system_message,
)
from examples.embedded_model.corpus import Document
from examples.embedded_model.words import NOUNS, STATES, VERBS

UNKNOWN = "I do not know, and there is no function that I could call."
GENERAL_QUESTIONS = (
    "How do I {0} a {1}?",
    "Why is the {1} {2}?",
    "Tell me about the {1}.",
    "Explain what a {1} is.",
    "What is a {1}?",
    "Write a text about the {1} and the {3}.",
    "Give me an example of a {1}.",
)
GENERAL = 6  # how many kinds of other questions they are as frequent as


def thinking_chat(number: int, entries: Sequence[tuple[str, str]]) -> list[Message]:
    """Return a conversation without functions, with thinking before each answer."""
    draw = Draw(f"thinking {number}", entries, held_out=False)
    messages = system_message(draw)
    for _ in range(1 + draw.below(3)):
        name, text = draw.entry()
        question = draw.one(("What does {} do?", "What is {}?", "Can you explain {}?", "Please describe {}.")).format(
            name
        )
        *_, last = name.split(".")
        thought = f"The question is about {name}. I say what {last} is, in a sentence or two."
        messages += [{"role": "user", "content": question}, answer_message(text, thought, True)]
    return messages


def chat_without_functions(number: int, entries: Sequence[tuple[str, str]]) -> list[Message]:
    """Return a conversation with the questions of `conversation`, but no function that could answer them.

    Without such conversations a model learns to call functions that its prompt does not have.
    """
    draw = Draw(f"chat {number}", entries, held_out=False)
    thinks = draw.below(THINKING_ONE_IN) == 0
    messages = system_message(draw)
    for _ in range(1 + draw.below(3)):
        question, answer = _plain_exchange(draw)
        messages += [
            {"role": "user", "content": question},
            answer_message(answer, "There is no function for this.", thinks),
        ]
    return messages


def _plain_exchange(draw: Draw) -> tuple[str, str]:
    """Return a question and its answer without a function."""
    kind = draw.below(len(KINDS) + 1 + GENERAL)
    if kind < len(KINDS):
        turn = KINDS[kind](draw)
        return turn.question, turn.answer if KINDS[kind] is documentation else UNKNOWN
    if kind == len(KINDS):
        return SMALL_TALK[draw.below(len(SMALL_TALK))]
    noun, other = draw.one(NOUNS), draw.one(NOUNS)
    question = draw.one(GENERAL_QUESTIONS)
    return question.format(draw.one(VERBS), noun, draw.one(STATES), other), UNKNOWN


def training_conversations(
    documents: Sequence[Document], template: str, count: int, *, thinking: int, plain: int
) -> Iterator[str]:
    """Texts of `count` conversations with functions, and of `thinking` and `plain` ones without.

    Args:
        documents: Those of the training side.
        template: The model's chat template.
        count: Number of conversations with functions.
        thinking: Number of conversations about documented names, with thinking.
        plain: Number of conversations whose questions would need functions.
    """
    known = entries(documents)
    for number in range(count):
        yield rendered(template, *conversation(number, known))
    for number in range(thinking):
        yield rendered(template, thinking_chat(number, known), ())
    for number in range(plain):
        yield rendered(template, chat_without_functions(number, known), ())
