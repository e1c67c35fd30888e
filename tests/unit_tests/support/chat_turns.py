"""Chats of six sampled turns over HTTP: each turn resumes where the last one ended, and computes the right logits."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from megatron_ext.server.openai.chat import ChatFormat
from megatron_ext.server.openai.protocol import Message, dicts_of
from megatron_ext.text.chat_template import ChatOptions
from megatron_ext.text.chat_tokens import RenderedChat
from tests.unit_tests.support.agent_loop import TOOLS
from tests.unit_tests.support.server import LiveServer

TURNS = 6
SAMPLED = {"temperature": 1.0, "return_token_ids": True, "explain_prefix_cache": True}
WORDS = ("naïve", "日本語", '{"a": [1, 2]}', "\n\n", "  two", "🙂", "def f(x):\n    return x", "Oslo")
CALLS = tuple(
    {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False, "separate_reasoning": False}
    for choice in ("none", "required")
)
"""Fields of the turns of even and of odd numbers."""


def post(server: LiveServer, path: str, body: dict, **headers: str) -> dict:
    answer = server.http.post(path, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


def ask(server: LiveServer, messages: list[dict], seed: int = 0, **fields: object) -> tuple[dict, list[int], dict]:
    """The choice of a chat, its prompt's ids, and the details of its prompt tokens."""
    body = post(
        server, "/v1/chat/completions", {"messages": messages, "seed": seed, "max_tokens": 24, **SAMPLED, **fields}
    )
    return body["choices"][0], body["prompt_token_ids"], body["usage"]["prompt_tokens_details"]


def sent_back(choice: dict) -> dict:
    message = choice["message"]
    return {name: message[name] for name in ("role", "content", "tool_calls") if message.get(name) is not None}


@dataclass(frozen=True)
class Turn:
    """Token ids through an answer, with the log-probs of the answer's."""

    ids: list[int]
    log_probs: list[float]


def play(server: LiveServer, seed: int, counts: Counter[str], fields: Sequence[dict] = CALLS) -> None:
    """Play a chat.

    Each turn whose rendering begins with the turn before skips all full blocks of it; others are counted by cause.
    """
    drawn, vocabulary = random.Random(seed), server.serving.vocabulary
    block = server.serving.limits.block_size
    messages = [{"role": "system", "content": f"Chat {seed}. " + " ".join(drawn.choices(WORDS, k=12))}]
    played: list[Turn] = []
    before, answer, reason = list[int](), list[int](), ""
    for turn in range(TURNS):
        messages = [*messages, {"role": "user", "content": " ".join(drawn.choices(WORDS, k=drawn.randint(2, 9)))}]
        given = {**fields[turn % 2], "max_tokens": 80, "logprobs": True}
        choice, prompt, details = ask(server, messages, seed * TURNS + turn, **given)
        if before:
            shown = vocabulary.detokenize(prompt, skip_special_tokens=False)
            if shown.startswith(vocabulary.detokenize(before, skip_special_tokens=False)):
                assert prompt[: len(before)] == before
                whole = (len(before) - (reason == "length")) // block * block  # the last token is not computed
                assert details["cached_tokens"] == whole, (seed, turn)
                counts["resumed"] += 1
            else:
                place = next(i for i, (a, b) in enumerate(zip(prompt, before, strict=False)) if a != b)
                is_counted = place // block < len(prompt) // block  # not in the part that fills no block
                assert ("retokenized" in details["computed_tokens_by_reason"]) is is_counted
                written = [vocabulary.detokenize(answer, skip_special_tokens=skip) for skip in (True, False)]
                counts["a special token" if written[0] != written[1] else f"retokenized after {reason}"] += 1
        before, reason = prompt + choice["token_ids"], choice["finish_reason"]
        played.append(Turn(before[:], [one["logprob"] for one in choice["logprobs"]["content"]]))
        if before[-1] in server.serving.chat_format.ends:  # the template writes its own
            before.pop()
        answer = before[len(prompt) :]
        messages.append(sent_back(choice))
        for call in choice["message"].get("tool_calls") or ():
            counts["calls"] += 1
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": json.dumps({"is": "done"})})
    check_log_probs(server, played)
    counts["compared"] += sum(len(one.log_probs) for one in played)


def check_log_probs(server: LiveServer, played: Sequence[Turn]) -> None:
    """Check the log-probs of all answers by prefills without the cache, one for turns that continue each other."""
    rest = list(played)
    while rest:
        whole = rest[-1].ids
        body = {"prompt": whole, "max_tokens": 1, "echo": True, "logprobs": 0, "enable_prefix_caching": False}
        scored = post(server, "/v1/completions", body)["choices"][0]["logprobs"]["token_logprobs"]
        for one in rest:
            if whole[: len(one.ids)] == one.ids:
                found = scored[len(one.ids) - len(one.log_probs) : len(one.ids)]
                torch.testing.assert_close(torch.tensor(one.log_probs), torch.tensor(found), rtol=0, atol=1e-4)
        rest = [one for one in rest if whole[: len(one.ids)] != one.ids]


def play_all(server: LiveServer, seeds: range, together: int = 1, fields: Sequence[dict] = CALLS) -> Counter[str]:
    """Play a chat for each seed, some at a time, with empty pools before; return the counts of their turns."""
    counts: Counter[str] = Counter()
    with ThreadPoolExecutor(together) as pool:
        for first in range(0, len(seeds), together):
            server.reset_cache()
            list(pool.map(lambda seed: play(server, seed, counts, fields), seeds[first : first + together]))
    return counts


def rendered(chat_format: ChatFormat, messages: Sequence[Message], options: ChatOptions | None = None) -> RenderedChat:
    """Prompt of messages."""
    return chat_format.render_dicts(dicts_of(messages), options)
