"""Block hashes as people see them.

Whoever knows the tokens of a prompt can compute its block hash, so a block hash that is shown tells who can guess a
prompt that he guessed right. What leaves the process, over HTTP or into a log, is therefore keyed with a secret that
the process makes at its start and never shows: equal block hashes look equal for as long as it lives, and mean nothing
elsewhere. Cache keys themselves have no secret: other ranks and replicas must find what this one cached.
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
    """What stands for a block hash outside: 64 hexadecimal digits."""
    return blake2b(block_hash, digest_size=HASH_BYTES, key=_SECRET, person=_SHOWN_DOMAIN).hexdigest()


def event_hash(block_hash: BlockHash) -> int:
    """What stands for a block hash in KV events: the same with 64 bits, as an integer."""
    keyed = blake2b(block_hash, digest_size=8, key=_SECRET, person=_EVENT_DOMAIN)
    return int.from_bytes(keyed.digest(), "big")


def event_salt(salt: str) -> str:
    """What stands for a request's salt in KV events: 32 hexadecimal digits, the same in every process.

    A router has to tell which prompts may share, so this one has no secret. Whoever reads events reads tokens too.
    """
    data = salt.encode("utf-8", "surrogatepass")
    return blake2b(data, digest_size=16, person=_SALT_DOMAIN).hexdigest()
