"""Tokenization of prompts by replicas.

A replica has the tokenizer and the chat template, and returns the ids that it will itself compute; the coordinator
needs neither of them, nor torch. Nothing is kept.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from megatron_ext.coordinator.membership.fleet import Fleet
from megatron_ext.coordinator.membership.member import Member
from megatron_ext.coordinator.replica_client import BadAnswer, CallFailed, Headers, fetch
from megatron_ext.coordinator.routed_request import RoutedPrompt, RoutedRequest
from megatron_ext.server.api_errors import ApiError
from megatron_ext.server.api_keys import Caller, caller_of

MAX_ASKED = 2  # replicas asked for the tokens of one prompt before it is routed without them
JSON = (b"content-type", b"application/json")
_TEMPLATE = ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")
_COMPLETION_TOKENS = 16  # OpenAI's default
_UNKNOWN_TOKENS = 1 << 30  # as many as fit


class Prompts:
    """Converts request bodies to routed requests; see the module.

    Args:
        fleet: Fleet whose replicas tokenize.
        needs_tokens: Whether the routing policy uses prompts.
        has_keys: Whether the coordinator itself checks API keys.
    """

    def __init__(self, fleet: Fleet, *, needs_tokens: bool, has_keys: bool) -> None:
        self._fleet = fleet
        self._needs_tokens = needs_tokens
        self._has_keys = has_keys

    async def routed(
        self, path: str, content: Mapping[str, object], body: bytes, authorization: bytes | None, caller: Caller
    ) -> RoutedRequest:
        """Return the routed request of a body. Invalid bodies other than an unknown model are reported by the replica.

        Args:
            path: Path of the route.
            content: Parsed body.
            body: Raw body.
            authorization: Authorization header; None without one.
            caller: Caller by the coordinator's own keys.

        Raises:
            ApiError: See `Groups.resolve`.
        """
        group = self._fleet.groups.resolve(content.get("model"))
        members = self._fleet.groups.members(group, self._fleet.ready())
        are_keyed = any(member.beat is not None and member.beat.has_keys for member in members)
        salt = _text(content.get("cache_salt"))
        if self._has_keys and not are_keyed and members:  # replicas without keys do not bind salts
            salt = caller.bind(salt)
            body = json.dumps({**content, "cache_salt": salt}).encode()
        elif are_keyed:
            scheme, _, key = (authorization or b"").partition(b" ")
            if scheme.lower() == b"bearer":
                salt = caller_of(key.decode("latin-1")).bind(salt)
        headers = [JSON, self._fleet.sender]
        headers += [] if authorization is None else [(b"authorization", authorization)]
        prompt = await self._prompt(content, headers, members, salt)
        return RoutedRequest(path, headers, body, content.get("stream") is True, _new_tokens(content), prompt, group)

    async def _prompt(
        self, content: Mapping[str, object], headers: Headers, members: list[Member], salt: str | None
    ) -> RoutedPrompt:
        if not self._needs_tokens or len(members) < 2:
            return RoutedPrompt.private()
        tokens = _first(content.get("prompt"))
        if isinstance(tokens, str) or "messages" in content:
            tokens = await self._tokenized(content, tokens, headers, members)
        try:
            shares = content.get("enable_prefix_caching") is not False
            return RoutedPrompt.of(tokens, salt) if shares and tokens else RoutedPrompt.private(tokens or ())
        except (OverflowError, TypeError):  # invalid token ids; the replica reports them
            return RoutedPrompt.private()

    async def _tokenized(
        self, content: Mapping[str, object], text: object, headers: Headers, members: list[Member]
    ) -> list[int]:
        """Return token ids; empty if no replica answers, or the request is invalid."""
        fields = {name: content[name] for name in _TEMPLATE if content.get(name) is not None}
        question = json.dumps(fields if "messages" in fields else {"prompt": text}).encode()
        for member in sorted(members, key=lambda one: len(one.calls))[:MAX_ASKED]:
            try:
                answer = await fetch(
                    member.address, "POST", "/tokenize", headers, question, patience=self._fleet.timeout / 2
                )
            except BadAnswer as error:
                self._fleet.note_bad_answer(member, error)
                continue
            except CallFailed as error:
                self._fleet.note_silence(member, str(error))
                continue
            reply = answer.json()
            tokens = reply.get("tokens") if answer.status == 200 and isinstance(reply, dict) else None
            return tokens if isinstance(tokens, list) else []
        return []


def _first(prompt: object) -> list[int] | str:
    """Return the first of several prompts, which decides the route: all run on one replica."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], list | str):
        prompt = prompt[0]
    return prompt if isinstance(prompt, list | str) else []


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _new_tokens(content: Mapping[str, object]) -> int:
    """Return the maximum number of generated tokens of all choices."""
    limits = [content.get(name) for name in ("max_completion_tokens", "max_tokens")]
    known = [one for one in limits if isinstance(one, int) and one >= 0]
    limit = known[0] if known else _UNKNOWN_TOKENS if "messages" in content else _COMPLETION_TOKENS
    choices = content.get("n")
    return limit * (choices if isinstance(choices, int) and 0 < choices <= 128 else 1)


def checked(content: object) -> Mapping[str, object]:
    """Return the body if it is an object.

    Raises:
        ApiError: The body is not an object.
    """
    if not isinstance(content, dict):
        raise ApiError(400, "the body must be an object")
    return content
