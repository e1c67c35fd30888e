"""Bounds of KV events: of what a publisher sends, keeps for replays, and accepts."""

from __future__ import annotations

# Sent
BATCH_BYTES = 2**18  # of a message with several events
EVENT_BLOCKS = 64  # of a `BlockStored` event, since encoding one blocks other threads
EVENT_TOKENS = 2**15  # of a `BlockStored` event of several blocks
EVENT_HASHES = 2**10  # of any other event
MAX_BLOCK_TOKENS = 2**16  # of a block; such a block has at most 330 KB as an event
MAX_TOPIC_BYTES = 512

# Kept for replays, for each socket
MAX_BUFFER_STEPS = 2**20  # messages
BUFFER_BYTES = 2**28

# Accepted
MAX_REQUEST_BYTES = 2**10  # of a frame: subscriptions, replay requests, handshakes
