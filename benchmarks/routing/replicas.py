"""Two replicas behind a coordinator beside one with twice the memory: skipped tokens, and the cost of a killed replica.

Every replica is a process with the embedded model; chats go through the `openai` client one by one, all first turns
before all second ones. Then one of the two is killed while all chats send requests at once.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx
import openai

from benchmarks.cases import Run, case

CHATS, TURNS = 32, 4
ANSWER_TOKENS = 4
SYSTEM = "You answer in one short sentence, and you say so when you do not know."
WORDS = "block prefix state snapshot token cache model layer prompt answer turn chat step queue batch weight".split()
CACHING = "--inference-dynamic-batching-prefix-caching"
BLOCKS, SLOTS = 200, 64  # of a replica; the big one has twice as many
SMALL = ("--inference-dynamic-batching-block-size", "16", "--inference-dynamic-batching-max-requests", "16")
SECONDS = 120.0


def memory(times: int = 1) -> tuple[str, ...]:
    """Flags of a replica with so many times the memory of a small one."""
    blocks, slots = str(times * BLOCKS), str(times * SLOTS)
    return (*SMALL, "--inference-dynamic-batching-block-count", blocks, f"{CACHING}-mamba-slots", slots)


def question(chat: int, turn: int) -> str:
    """User message of a turn; each chat has its own words, so that chats share only the system message."""
    dice = random.Random(100 * chat + turn)
    return f"Chat {chat}: " + " ".join(dice.choice(WORDS) for _ in range(12)) + "?"


@dataclass
class Talk:
    """Results of all chats.

    Attributes:
        texts: Answers, by chat and turn.
        prompt: Tokens of all prompts.
        cached: Prompt tokens that were skipped.
    """

    texts: dict[tuple[int, int], str] = field(default_factory=dict)
    prompt: int = 0
    cached: int = 0

    @property
    def share(self) -> float:
        """Share of the prompt tokens that were skipped."""
        return self.cached / max(1, self.prompt)


def messages_of(texts: dict[tuple[int, int], str], chat: int, turn: int) -> list[dict[str, str]]:
    """A conversation up to a turn's question."""
    messages = [{"role": "system", "content": SYSTEM}]
    for before in range(turn):
        messages.append({"role": "user", "content": question(chat, before)})
        messages.append({"role": "assistant", "content": texts[chat, before]})
    return [*messages, {"role": "user", "content": question(chat, turn)}]


async def talk(client: openai.AsyncOpenAI, chats: int = CHATS, turns: int = TURNS) -> Talk:
    """All chats, turn by turn, one request at a time."""
    seen = Talk()
    for turn in range(turns):
        # In another order each turn: in the same one, two replicas in turn would each get the same chats again.
        for chat in random.Random(turn).sample(range(chats), chats):
            answer = await client.chat.completions.create(
                model="embedded",
                messages=messages_of(seen.texts, chat, turn),  # type: ignore[arg-type]  # plain dicts are taken
                max_tokens=ANSWER_TOKENS,
                temperature=0,
            )
            assert answer.usage is not None
            assert answer.usage.prompt_tokens_details is not None
            seen.texts[chat, turn] = answer.choices[0].message.content or ""
            seen.prompt += answer.usage.prompt_tokens
            seen.cached += answer.usage.prompt_tokens_details.cached_tokens or 0
    return seen


@dataclass
class Survived:
    """Results of requests while a replica died.

    Attributes:
        answers: Texts of the answered requests, by chat.
        errors: Chats whose stream ended with an error object, or whose answer was one.
        lost: Chats with neither.
    """

    answers: dict[int, str] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    lost: dict[int, str] = field(default_factory=dict)


async def ask_all(client: openai.AsyncOpenAI, texts: dict[tuple[int, int], str], turn: int, tokens: int) -> Survived:
    """The questions of one turn of all chats at once, half of them as streams."""
    seen = Survived()

    async def ask(chat: int) -> None:
        fields = {
            "model": "embedded",
            "messages": messages_of(texts, chat, turn),
            "max_tokens": tokens,
            "temperature": 0,
            "extra_body": {"ignore_eos": True},
        }
        try:
            if chat % 2:
                parts = await client.chat.completions.create(stream=True, **fields)
                pieces = [part.choices[0] async for part in parts if part.choices]
                assert pieces[-1].finish_reason is not None
                seen.answers[chat] = "".join(piece.delta.content or "" for piece in pieces)
            else:
                answer = await client.chat.completions.create(**fields)
                seen.answers[chat] = answer.choices[0].message.content
        except openai.APIError as error:
            told = seen.errors if getattr(error, "body", None) else seen.lost
            told[chat] = str(error)
        except (AssertionError, IndexError, httpx.HTTPError) as error:
            seen.lost[chat] = repr(error)

    await asyncio.gather(*(ask(chat) for chat in sorted({chat for chat, _ in texts})))
    return seen


class Process:
    """A tool in a process of its own, from the moment it is ready; a context manager that ends it."""

    def __init__(self, tool: str, *flags: str) -> None:
        variables = os.environ | {"OMP_NUM_THREADS": "1"}
        command = [sys.executable, f"tools/{tool}", *flags, "--port", "0", "--no-access-log"]
        self._process = subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        lines = iter(self._process.stdout.readline, "")
        self.url = next(line.split()[1] for line in lines if line.startswith("ready: "))

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.communicate(timeout=SECONDS)

    def kill(self) -> None:
        """Send SIGKILL, as the kernel does when memory is short."""
        self._process.send_signal(signal.SIGKILL)

    def client(self) -> openai.AsyncOpenAI:
        """OpenAI's, which does not try again by itself."""
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="unused", max_retries=0, timeout=SECONDS)


def replica(times: int = 1) -> Process:
    """A server with events."""
    kinds = ("", "replay-", "states-", "states-replay-")
    events = [word for kind in kinds for word in (f"--kv-events-{kind}endpoint", "tcp://127.0.0.1:0")]
    return Process("run_server.py", *memory(times), *events)


def coordinator(replicas: Sequence[Process], policy: str) -> Process:
    """Start a coordinator for these replicas."""
    urls = [word for one in replicas for word in ("--replica", one.url)]
    return Process("run_coordinator.py", *urls, f"{CACHING}-coordinator-policy", policy, "--replica-timeout", "10")


async def measure(chats: int, turns: int) -> tuple[dict[str, Talk], Survived, Survived]:
    """Measure all figures of the table and of the exit code."""
    talks: dict[str, Talk] = {}
    with replica(2) as big:
        async with big.client() as client:
            talks["one replica, twice the memory"] = await talk(client, chats, turns)
            texts = talks["one replica, twice the memory"].texts
            expected = await ask_all(client, texts, turns - 1, 24)
    with replica() as one, replica() as two:
        for policy in ("round_robin", "least_computed"):
            with coordinator([one, two], policy) as front:
                async with front.client() as client:
                    httpx.post(f"{front.url}/reset_prefix_cache", timeout=SECONDS).raise_for_status()
                    talks[f"two replicas, {policy}"] = await talk(client, chats, turns)
                    if policy == "least_computed":
                        asking = asyncio.ensure_future(ask_all(client, texts, turns - 1, 24))
                        await asyncio.sleep(1.0)
                        two.kill()
                        survived = await asking
    return talks, expected, survived


@case("routing", in_bench=True, quick={"chats": 3, "turns": 2})
def replicas(run: Run, chats: int = CHATS, turns: int = TURNS) -> None:
    """Skipped tokens of real replicas by policy; every request survives a killed replica with the same answer."""
    talks, expected, survived = asyncio.run(measure(chats, turns))
    for name, seen in talks.items():
        figures = {"prompt tokens": seen.prompt, "skipped tokens": seen.cached, "skipped, %": 100 * seen.share}
        run.row(name, figures)
    changed = [chat for chat, text in survived.answers.items() if text != expected.answers[chat]]
    counts = {"answered": len(survived.answers), "error objects": len(survived.errors)}
    checks = {"none lost": not survived.lost, "none changed": not changed}
    run.row("one of two killed", {**counts, **checks})
