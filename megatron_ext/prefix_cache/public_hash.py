"""Keyed block hashes for output: HTTP responses, logs and KV events.

A block hash can be computed from the tokens of a prompt alone, so a plain block hash would confirm a guessed prompt.
Every hash that leaves the process is therefore keyed with a secret, which the process draws at its start and never
outputs: equal block hashes have equal public hashes for the life of the process, and other processes cannot compare
them. Cache keys themselves have no secret: other ranks and replicas must find what this one cached.
"""

from __future__ import annotations

import secrets
from hashlib import blake2b

from megatron_ext.prefix_cache.hash_chain import HASH_BYTES, BlockHash

_SECRET = secrets.token_bytes(32)
_SHOWN_DOMAIN = b"mext.shown"
_EVENT_DOMAIN = b"mext.event"
_SALT_DOMAIN = b"mext.salt"


def public_hash(block_hash: BlockHash) -> str:
    """Return the public form of a block hash: 64 hexadecimal digits."""
    return blake2b(block_hash, digest_size=HASH_BYTES, key=_SECRET, person=_SHOWN_DOMAIN).hexdigest()


def event_hash(block_hash: BlockHash) -> int:
    """Return the public form of a block hash for KV events: a keyed hash of 64 bits, as an integer."""
    keyed = blake2b(block_hash, digest_size=8, key=_SECRET, person=_EVENT_DOMAIN)
    return int.from_bytes(keyed.digest(), "big")


def event_salt(salt: str) -> str:
    """Return the public form of a request's salt for KV events: 32 hexadecimal digits, the same in every process.

    A router has to know which prompts may share blocks, so this hash has no secret. Events contain the tokens anyway.
    """
    data = salt.encode("utf-8", "surrogatepass")
    return blake2b(data, digest_size=16, person=_SALT_DOMAIN).hexdigest()
