"""Bounds on what a replica may answer: bytes, lengths and numbers. Bounds of KV events are with their reader."""

from __future__ import annotations

# Bytes of answers
STATUS_BYTES = 2**18  # GET /replica
SMALL_ANSWER_BYTES = 2**24  # token ids, lists of models, administrators' routes
ANSWER_BYTES = 2**28  # a whole generated answer; 20 log-probs for each of 100,000 tokens have about 2**27
PARSED_BYTES = 2**20  # an answer that is parsed in whole before it is passed on
EVENT_BYTES = 2**26  # one server-sent event; the first may have the scores of the whole prompt

# Fields of GET /replica
MAX_NAME = 512  # characters of a model's name and of identifiers
MAX_BLOCK_SIZE = 2**20  # tokens
MAX_COUNT = 2**63 - 1  # counters, requests
MAX_BLOCKS = 2**23  # of all caches of a replica; the router keeps about 250 bytes of each, and as much of a snapshot
MAX_REQUESTS = 2**32
MAX_EVENT_SOURCES = 2**6  # data-parallel ranks; the coordinator opens up to eight files for each
MAX_SHOWN = 100  # characters of a wrong value in a message
