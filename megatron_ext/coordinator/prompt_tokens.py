"""Tokenization of prompts by replicas.

A replica has the tokenizer and the chat template, and returns the ids that it will itself compute; the coordinator
needs neither of them, nor torch. Nothing is kept.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_ext.coordinator.membership.fleet import Fleet
from megatron_ext.coordinator.membership.member import Member
from megatron_ext.coordinator.replica_client import BadAnswer, CallFailed, Headers, fetch
from megatron_ext.coordinator.routed_request import RoutedPrompt, RoutedRequest
from megatron_ext.server.anthropic.chat_translation import as_chat
from megatron_ext.server.anthropic.error_envelope import MESSAGES_PATH
from megatron_ext.server.anthropic.message_fields import CountTokensRequest
from megatron_ext.server.api_errors import ApiError
from megatron_ext.server.api_keys import Caller, caller_of
from megatron_ext.server.http.request_ids import HEADER
from megatron_ext.server.http.request_parts import TENANT_HEADER
from megatron_ext.server.log import REQUEST_ID
from megatron_ext.server.openai.responses_api.response_ids import owner_named

MAX_ASKED = 2  # replicas asked for the tokens of one prompt before it is routed without them
JSON = (b"content-type", b"application/json")
_TEMPLATE = (
    *("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"),
    *("reasoning_effort", "verbosity"),
)
_RESPONSE = ("input", "instructions", "previous_response_id", "tools", "reasoning", "text", "chat_template_kwargs")
_RESPONSES = "/v1/responses"
_COMPLETION_TOKENS = 16  # OpenAI's default
_UNKNOWN_TOKENS = 1 << 30  # as many as fit


@dataclass(frozen=True)
class _Question:
    """Question for the tokens of a prompt: path, body, and the field of the answer with the tokens."""

    path: str
    body: Mapping[str, object]
    field: str


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
        self,
        path: str,
        content: Mapping[str, object],
        body: bytes,
        authorization: bytes | None,
        caller: Caller,
        samples: str | None = None,
    ) -> RoutedRequest:
        """Return the routed request of a body. Invalid bodies other than an unknown model are reported by the replica.

        Args:
            path: Path of the route.
            content: Parsed body.
            body: Raw body.
            authorization: Authorization header; None without one.
            caller: Caller by the coordinator's own keys.
            samples: Group of samples, as the client names it.

        Raises:
            ApiError: See `Groups.resolve`.
        """
        group = self._fleet.groups.resolve(content.get("model"))
        members = self._fleet.groups.members(group, self._fleet.known())  # a request may wait for one of them
        are_keyed = any(member.beat is not None and member.beat.has_keys for member in members)
        salt = _text(content.get("cache_salt"))
        named: Headers = []
        if self._has_keys and not are_keyed and members:  # replicas without keys do not bind salts
            salt, samples = caller.bind(salt), samples and caller.bind(samples)
            body = json.dumps({**content, "cache_salt": salt}).encode()
            named = [(TENANT_HEADER.encode(), caller.tenant.encode())]
        elif are_keyed:
            scheme, _, key = (authorization or b"").partition(b" ")
            if scheme.lower() == b"bearer":
                caller = caller_of(key.decode("latin-1"))
                salt, samples = caller.bind(salt), samples and caller.bind(samples)
        headers = [JSON, self._fleet.sender, (HEADER, REQUEST_ID.get().encode()), *named]
        headers += [] if authorization is None else [(b"authorization", authorization)]
        owner = self._owner(path, content, group)
        asked = self._fleet.groups.members(group, self._fleet.ready()) or members
        if self._needs_tokens and len(asked) > 1:
            prompt = await self._prompt(path, content, headers, asked if owner is None else [owner], salt)
        else:
            prompt = RoutedPrompt.private()
        is_stream, new_tokens = content.get("stream") is True, _new_tokens(content)
        url = None if owner is None else owner.url
        samples = None if samples is None else f"{group or ''}:{samples}"
        return RoutedRequest(path, headers, body, is_stream, new_tokens, prompt, group, url, samples)

    def _owner(self, path: str, content: Mapping[str, object], group: str | None) -> Member | None:
        """Return the replica of the group that has stored what a request continues; None if it continues nothing."""
        owner = self._fleet.owner(owner_named(content)) if path == _RESPONSES else None
        return None if owner is None else next(iter(self._fleet.groups.members(group, [owner])), None)

    async def _prompt(
        self, path: str, content: Mapping[str, object], headers: Headers, members: list[Member], salt: str | None
    ) -> RoutedPrompt:
        given = _first(content.get("prompt"))
        question = _question(path, content, given)
        tokens = given if isinstance(given, list) else []
        if question is not None:
            tokens = await self._tokenized(question, headers, members)
        try:
            shares = content.get("enable_prefix_caching") is not False
            return RoutedPrompt.of(tokens, salt) if shares and tokens else RoutedPrompt.private(tokens or ())
        except (OverflowError, TypeError):  # invalid token ids; the replica reports them
            return RoutedPrompt.private()

    async def _tokenized(self, question: _Question, headers: Headers, members: list[Member]) -> list[int]:
        """Return token ids; empty if no replica answers, or the request is invalid."""
        body = json.dumps(question.body).encode()
        for member in sorted(members, key=lambda one: len(one.calls))[:MAX_ASKED]:
            try:
                answer = await fetch(
                    member.address, "POST", question.path, headers, body, patience=self._fleet.timeout / 2
                )
            except BadAnswer as error:
                self._fleet.note_bad_answer(member, error)
                continue
            except CallFailed as error:
                self._fleet.note_silence(member, str(error))
                continue
            reply = answer.json()
            tokens = reply.get(question.field) if answer.status == 200 and isinstance(reply, dict) else None
            return tokens if isinstance(tokens, list) else []
        return []


def _question(path: str, content: Mapping[str, object], prompt: object) -> _Question | None:
    """Return the question for a prompt's tokens; None if the prompt has them, or the request is invalid."""
    if path == _RESPONSES:
        fields = {name: content[name] for name in _RESPONSE if content.get(name) is not None}
        return _Question("/v1/responses/input_tokens", fields | {"return_token_ids": True}, "prompt_token_ids")
    if path == MESSAGES_PATH:
        try:
            chat = as_chat(CountTokensRequest.model_validate({**content}))
        except (ApiError, ValueError):
            return None
        content = chat.model_dump(include=set(_TEMPLATE), exclude_none=True)
    elif not isinstance(prompt, str) and "messages" not in content:
        return None
    fields = {name: content[name] for name in _TEMPLATE if content.get(name) is not None}
    return _Question("/tokenize", fields if "messages" in fields else {"prompt": prompt}, "tokens")


def _first(prompt: object) -> list[int] | str:
    """Return the first of several prompts, which decides the route: all run on one replica."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], list | str):
        prompt = prompt[0]
    return prompt if isinstance(prompt, list | str) else []


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _new_tokens(content: Mapping[str, object]) -> int:
    """Return the maximum number of generated tokens of all choices."""
    limits = [content.get(name) for name in ("max_completion_tokens", "max_output_tokens", "max_tokens")]
    known = [one for one in limits if isinstance(one, int) and one >= 0]
    limit = (
        known[0] if known else _UNKNOWN_TOKENS if "messages" in content or "input" in content else _COMPLETION_TOKENS
    )
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
