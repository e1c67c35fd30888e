"""Stored responses: conversations in memory that follow-ups name by id, bounded in bytes and time, per API key."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from megatron_ext.server.api_errors import ApiError, no_such_response

RANDOM_BYTES = 16
TAG_DIGITS = 8  # hexadecimal
_ID = re.compile(rf"[a-z]+_[0-9a-f]{{{2 * RANDOM_BYTES}}}([0-9a-f]{{{TAG_DIGITS}}})")
LONGEST_AGE = 24 * 3600.0  # seconds
_PERIOD = 60.0  # seconds between two looks for old ones
_OVERHEAD = 1024  # bytes that a stored response takes besides its contents
_ITEM_OVERHEAD = 256  # bytes that the id of an item takes
Key = tuple[str, str]  # tenant and id


def tag_of(instance: str) -> str:
    """Return the tag of a process, by which routers send follow-ups to it: the beginning of its instance id."""
    return instance[:TAG_DIGITS]


def new_id(prefix: str, tag: str) -> str:
    """Return a new id of a response or an item: 128 random bits, and the tag of the process that may store it."""
    return f"{prefix}_{secrets.token_hex(RANDOM_BYTES)}{tag}"


def owner_tag(identifier: object) -> str | None:
    """Return the tag in an id; None if it is no such id."""
    found = _ID.fullmatch(identifier) if isinstance(identifier, str) else None
    return None if found is None else found[1]


def owner_named(body: Mapping[str, object]) -> str | None:
    """Return the tag in the first id of a stored response or item that a body names; None without one."""
    return next((tag for one in _named(body) if (tag := owner_tag(one)) is not None), None)


def _named(body: Mapping[str, object]) -> Iterator[object]:
    yield body.get("previous_response_id")
    items = body.get("input")
    for item in items if isinstance(items, list) else ():
        if isinstance(item, Mapping) and item.get("type") in (None, "item_reference") and "role" not in item:
            yield item.get("id")


@dataclass(eq=False)
class StoredResponse:
    """One turn of a conversation; earlier turns are shared with the other responses that follow them.

    Attributes:
        key: Tenant and id of the response.
        items: The turn's input, as a JSON list.
        output: The turn's output items by id, each as JSON.
        response: The response object, as JSON.
        before: Response that it follows.
        expires: Time at which it is dropped.
        uses: Number of references: one while it can be named, and one for each stored response that follows it.
    """

    key: Key
    items: bytes
    output: Mapping[str, bytes]
    response: bytes
    before: StoredResponse | None
    expires: float
    uses: int = field(default=0, init=False)

    @property
    def size(self) -> int:
        """Bytes that it takes."""
        return self.length + len(self.response) + _OVERHEAD + _ITEM_OVERHEAD * len(self.output)

    @property
    def length(self) -> int:
        """Bytes of its input and output."""
        return len(self.items) + sum(map(len, self.output.values()))


class ResponseStore:
    """Store of responses; the oldest ones make room. Used in the event loop only.

    Args:
        max_bytes: Maximum size of all stored responses; 0 for no store.
        clock: Returns seconds.
        max_conversation: Maximum bytes of a conversation that is continued: what a body may have.

    Attributes:
        used_bytes: Size of the stored responses, dropped ones included while others continue them.
    """

    def __init__(
        self, max_bytes: int, clock: Callable[[], float] = time.monotonic, *, max_conversation: int = sys.maxsize
    ) -> None:
        self._max = max_bytes
        self._max_conversation = max_conversation
        self._clock = clock
        self._stored: dict[Key, StoredResponse] = {}  # the oldest first
        self._items: dict[Key, Key] = {}  # response of each output item
        self.used_bytes = 0

    def __len__(self) -> int:
        return len(self._stored)

    @property
    def is_on(self) -> bool:
        """True if responses can be stored."""
        return self._max > 0

    def put(
        self, key: Key, items: Sequence[object], response: Mapping[str, object], before: StoredResponse | None
    ) -> bool:
        """Store a response.

        Args:
            key: Tenant and new id.
            items: The turn's input items, as JSON values.
            response: The response object.
            before: Response that it follows.

        Returns:
            False if it does not fit, even alone.
        """
        output = response["output"]
        assert isinstance(output, list), "it is a list of items"
        items_out = {str(item["id"]): _json(item) for item in output}
        expires = self._clock() + LONGEST_AGE
        new = StoredResponse(key, _json(items), items_out, _json(response), before, expires)
        self._hold(new)
        self._stored[key] = new
        self._items |= {(key[0], one): key for one in items_out}
        self.drop_old()
        while self.used_bytes > self._max and self._stored:
            self._drop(next(iter(self._stored)))
        return key in self._stored

    def get(self, key: Key, param: str) -> StoredResponse:
        """Return a stored response.

        Args:
            key: Tenant and id.
            param: Field that names it, for the error.

        Raises:
            ApiError: 404: the tenant has no stored response of this id.
        """
        self.drop_old()
        found = self._stored.get(key)
        if found is None:
            raise no_such_response(key[1], param, is_on=self.is_on)
        return found

    def item(self, key: Key, param: str) -> bytes:
        """Return an output item of a stored response as JSON; arguments and errors as in `get`."""
        found = self.get(self._items.get(key, key), param)
        if key[1] not in found.output:  # the id of a response
            raise no_such_response(key[1], param, is_on=self.is_on)
        return found.output[key[1]]

    def delete(self, key: Key) -> None:
        """Drop a stored response; later responses keep its turn.

        Raises:
            ApiError: As in `get`.
        """
        self.get(key, "response_id")
        self._drop(key)

    def conversation(self, last: StoredResponse | None, more: int = 0) -> list[object]:
        """Return the items of the whole conversation up to a response.

        Args:
            last: The response; None for no items.
            more: Bytes of other stored items of the conversation.

        Raises:
            ApiError: It is longer than a body may be.
        """
        turns = []
        while last is not None:
            turns.append(last)
            last = last.before
        size = more + sum(turn.length for turn in turns)
        if size > self._max_conversation:
            limit = f"{self._max_conversation} (--max-body-mb)"
            message = f"the stored conversation has {size} bytes; the limit is {limit}; send less as input"
            raise ApiError(400, message, param="input")
        return [
            item
            for turn in reversed(turns)
            for item in (*json.loads(turn.items), *map(json.loads, turn.output.values()))
        ]

    async def run(self) -> None:
        """Drop old responses until the task is cancelled."""
        while self.is_on:
            await asyncio.sleep(_PERIOD)
            self.drop_old()

    def drop_old(self) -> None:
        """Drop the responses that are too old."""
        now = self._clock()
        while self._stored and (oldest := next(iter(self._stored.values()))).expires <= now:
            self._drop(oldest.key)

    def _hold(self, new: StoredResponse) -> None:
        """Count a response, and the turns before it that nothing else has."""
        turn: StoredResponse | None = new
        while turn is not None:
            turn.uses += 1
            if turn.uses > 1:
                return
            self.used_bytes += turn.size
            turn = turn.before

    def _drop(self, key: Key) -> None:
        """Forget the id of a response, and free the turns that no other response follows."""
        dropped = self._stored.pop(key)
        for one in dropped.output:
            self._items.pop((key[0], one), None)
        turn: StoredResponse | None = dropped
        while turn is not None:
            turn.uses -= 1
            if turn.uses:
                return
            self.used_bytes -= turn.size
            turn = turn.before


def _json(content: object) -> bytes:
    return json.dumps(content, ensure_ascii=False, allow_nan=False).encode()
