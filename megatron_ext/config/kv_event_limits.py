"""Bounds of KV events: what a publisher sends, and what a reader or a publisher accepts from the other side.

What a publisher sends stays well below what a reader accepts, so that only faulty or hostile peers meet the bounds.
"""

from __future__ import annotations

# Sent by a publisher
BATCH_BYTES = 2**18  # of a message with several events
EVENT_BLOCKS = 64  # of a `BlockStored` event, since encoding one blocks other threads
EVENT_TOKENS = 2**15  # of a `BlockStored` event of several blocks
EVENT_HASHES = 2**10  # of any other event
MAX_BLOCK_TOKENS = 2**16  # of a block; such a block has at most 330 KB as an event

# Kept by a publisher for replays, for each of its sockets
MAX_BUFFER_STEPS = 2**20  # messages
BUFFER_BYTES = 2**28

# Accepted
MAX_MESSAGE_BYTES = 2**20  # of a frame that a reader receives (ZMQ_MAXMSGSIZE)
MAX_REQUEST_BYTES = 2**10  # of a frame that a publisher receives: subscriptions, replay requests, handshakes
MAX_BATCH_EVENTS = 2**12  # of a message
MAX_EVENT_BLOCKS = 2**10  # of an event, whatever its type
MAX_EXTRA_KEYS = 16  # of a block
MAX_HASH_BYTES = 64  # of a block's hash, if it is not an integer
MAX_SEQUENCE = 2**63 - 1  # number of a message; larger ones are negative in 8 bytes
MAX_RANK = 2**16  # data-parallel ranks
MAX_TOPIC_BYTES = 512
