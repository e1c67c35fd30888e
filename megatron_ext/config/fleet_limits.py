"""Bounds of what the processes of a fleet accept from each other: KV events, and answers of replicas.

What a publisher sends stays well below what a reader accepts, so that only faulty or hostile peers meet the bounds.
"""

from __future__ import annotations

# KV events: sent by a publisher
BATCH_BYTES = 2**18  # of a message with several events
EVENT_BLOCKS = 64  # of a `BlockStored` event, since encoding one blocks other threads
EVENT_TOKENS = 2**15  # of a `BlockStored` event of several blocks
EVENT_HASHES = 2**10  # of any other event
MAX_BLOCK_TOKENS = 2**16  # of a block; such a block has at most 330 KB as an event

# KV events: kept by a publisher for replays, for each of its sockets
MAX_BUFFER_STEPS = 2**20  # messages
BUFFER_BYTES = 2**28

# KV events: accepted
MAX_MESSAGE_BYTES = 2**20  # of a frame that a reader receives (ZMQ_MAXMSGSIZE)
MAX_REQUEST_BYTES = 2**10  # of a frame that a publisher receives: subscriptions, replay requests, handshakes
MAX_BATCH_EVENTS = 2**12  # of a message
MAX_EVENT_BLOCKS = 2**10  # of an event, whatever its type
MAX_EXTRA_KEYS = 16  # of a block
MAX_HASH_BYTES = 64  # of a block's hash, if it is not an integer
MAX_SEQUENCE = 2**63 - 1  # number of a message; larger ones are negative in 8 bytes
MAX_RANK = 2**16  # data-parallel ranks
MAX_TOPIC_BYTES = 512

# Answers of replicas, in bytes
STATUS_BYTES = 2**18  # GET /replica
SMALL_ANSWER_BYTES = 2**24  # token ids, lists of models, administrators' routes
ANSWER_BYTES = 2**28  # a whole generated answer; 20 log-probs for each of 100,000 tokens have about 2**27
PARSED_BYTES = 2**20  # an answer that is parsed in whole before it is passed on
EVENT_BYTES = 2**26  # one server-sent event; the first may have the scores of the whole prompt

# Fields of GET /replica
MAX_NAME = 512  # characters of a model's name and of identifiers
MAX_NAMES = 2**6  # other names of a model
MAX_BLOCK_SIZE = 2**20  # tokens
MAX_COUNT = 2**63 - 1  # counters, requests
MAX_BLOCKS = 2**23  # of all caches of a replica; the router keeps about 250 bytes of each, and as much of a snapshot
MAX_REQUESTS = 2**32
MAX_EVENT_SOURCES = 2**6  # data-parallel ranks; the coordinator opens up to eight files for each
MAX_SHOWN = 100  # characters of a wrong value in a message
