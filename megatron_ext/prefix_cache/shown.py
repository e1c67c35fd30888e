"""Digests as people see them.

Whoever knows the tokens of a prompt can compute its digest, so a digest that is shown tells who can guess a prompt that
he guessed right. What leaves the process, over HTTP or into a log, is therefore keyed with a secret that the process
makes at its start and never shows: equal digests look equal for as long as it lives, and mean nothing elsewhere.
Cache keys themselves have no secret: other ranks and replicas must find what this one cached.
"""

from __future__ import annotations

import secrets
from hashlib import blake2b

from megatron_ext.prefix_cache.hash_chain import DIGEST_BYTES, Digest

_SECRET = secrets.token_bytes(32)
_SHOWN_DOMAIN = b"mext.shown"


def shown(digest: Digest) -> str:
    """What stands for a digest outside: 64 hexadecimal digits."""
    return blake2b(digest, digest_size=DIGEST_BYTES, key=_SECRET, person=_SHOWN_DOMAIN).hexdigest()
