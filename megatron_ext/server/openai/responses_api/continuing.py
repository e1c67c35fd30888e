"""Conversations of requests of the Responses API, with the stored responses that they continue."""

from __future__ import annotations

import json
from dataclasses import dataclass

from megatron_ext.server.api_errors import ApiError
from megatron_ext.server.openai.protocol import Message
from megatron_ext.server.openai.request_fields import MAX_MESSAGES
from megatron_ext.server.openai.responses_api.conversation import ItemReference, items_of, messages_of
from megatron_ext.server.openai.responses_api.create_request import ResponsePrompt
from megatron_ext.server.openai.responses_api.response_store import ResponseStore, StoredResponse


@dataclass(frozen=True)
class Conversation:
    """Conversation of a request.

    Attributes:
        messages: Messages of the chat.
        items: The request's own input items, as JSON values.
        before: Stored response that they follow.
    """

    messages: list[Message]
    items: list[object]
    before: StoredResponse | None


def conversation_of(body: ResponsePrompt, store: ResponseStore, tenant: str) -> Conversation:
    """Return the conversation of a request, including the earlier turns that it continues.

    Args:
        body: Request.
        store: Stored responses.
        tenant: Tenant of the request.

    Raises:
        ApiError: A response or item that it names is not stored, or the conversation is invalid or too long.
    """
    name = body.previous_response_id
    before = None if name is None else store.get((tenant, name), "previous_response_id")
    named = [store.item((tenant, one.id), "input") for one in body.input if isinstance(one, ItemReference)]
    known = store.conversation(before, sum(map(len, named)))
    found = iter(named)
    own = [json.loads(next(found)) if isinstance(one, ItemReference) else one.model_dump() for one in body.input]
    count = len(known) + len(own)
    if count > MAX_MESSAGES:
        raise ApiError(400, f"the conversation has {count} items; at most {MAX_MESSAGES} are allowed", param="input")
    return Conversation(messages_of(items_of([*known, *own]), body.instructions), own, before)
