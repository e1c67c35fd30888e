"""Prompts: with shared prefixes, of conversations, and with nothing in common. Standard library only.

Prompts are texts, so that any server takes them: words that most tokenizers know, about a token each; the server
reports the number of tokens. A model without a tokenizer reads numbers.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

WORDS = """time year people way day man thing woman life child world school state family student group country problem
hand part place case week company system program question work number night point home water room mother area money
story fact month lot right study book eye job word business issue side kind head house service friend father power hour
game line end member law car city name team minute idea body back parent face others level office door health person art
war history party result change morning reason research girl guy moment air teacher force education""".split()
KINDS = ("shared", "chats", "unique")


@dataclass(frozen=True)
class Shape:
    """Amount of each kind of work.

    Attributes:
        requests: Requests of each kind of work; turns of chats count as requests.
        prefix: Words of a shared prefix.
        prefixes: Number of shared prefixes.
        own: Words that only one prompt has, and words of each turn.
        turns: Turns of a conversation.
        generated: Tokens of each answer.
        numbers: Bound of the numbers used as words; None for real words.
        seed: Seed of all texts.
    """

    requests: int = 64
    prefix: int = 512
    prefixes: int = 2
    own: int = 64
    turns: int = 4
    generated: int = 64
    numbers: int | None = None
    seed: int = 1

    def words(self, count: int, name: str) -> str:
        """Return a text that depends on its name only."""
        source = random.Random(f"{self.seed} {name}")
        if self.numbers is not None:
            return " ".join(str(source.randrange(self.numbers)) for _ in range(count))
        return " ".join(source.choice(WORDS) for _ in range(count))


@dataclass(frozen=True)
class Dialogue:
    """Turns of one client, in order; each prompt is the conversation so far and the next turn."""

    turns: tuple[str, ...]

    def prompts(self, answers: list[str]) -> Iterator[str]:
        """Yield the prompt of each turn; `answers` has the answer to each earlier one."""
        said = ""
        for number, turn in enumerate(self.turns):
            if number:
                said += f" {answers[number - 1].strip()} ".replace("  ", " ")
            said += turn
            yield said


def dialogues(kind: str, shape: Shape) -> list[Dialogue]:
    """Return the dialogues of all clients, of one kind of work."""
    if kind == "chats":
        count = max(1, shape.requests // shape.turns)
        return [
            Dialogue(tuple(shape.words(shape.own, f"chat {i} {turn}") for turn in range(shape.turns)))
            for i in range(count)
        ]
    if kind == "unique":
        length = shape.prefix + shape.own
        return [Dialogue((shape.words(length, f"unique {i}"),)) for i in range(shape.requests)]
    return [
        Dialogue((f"{shape.words(shape.prefix, f'prefix {i % shape.prefixes}')} {shape.words(shape.own, f'own {i}')}",))
        for i in range(shape.requests)
    ]
