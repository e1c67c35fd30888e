"""Limits on the resources that one client may use."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_ext.config.checks import flag_of, require

KB, MB = 2**10, 2**20


@dataclass(frozen=True)
class ServerLimits:
    """Limits on request bodies and connections. Times are in seconds."""

    max_body_mb: float = 8.0  # of 2**20 bytes
    max_connections: int = 1024
    header_timeout: float = 10.0  # from the connection, or a request's first byte, to the end of its headers
    body_timeout: float = 60.0  # for all of the body
    idle_timeout: float = 75.0  # between two requests, and for a client that does not read its response
    max_schema_kb: float = 64.0  # of 2**10 bytes: a JSON schema, or a regular expression
    grammar_timeout: float = 5.0  # to compile a schema or a regular expression
    responses_store_mb: float = 0.0  # of 2**20 bytes; 0: no responses are stored
    answers_memory_mb: float = 64.0  # of 2**20 bytes; 0: token ids of answers are not remembered

    def __post_init__(self) -> None:
        size, connections = self.max_body_mb, self.max_connections
        require(math.isfinite(size) and size > 0, f"--max-body-mb {size} must be more than zero")
        require(connections >= 1, f"--max-connections {connections} must be at least 1")
        schema = self.max_schema_kb
        require(math.isfinite(schema) and schema > 0, f"--max-schema-kb {schema} must be more than zero")
        for name, nothing in (("responses_store_mb", "no store"), ("answers_memory_mb", "no memory")):
            memory = getattr(self, name)
            valid = math.isfinite(memory) and memory >= 0
            require(valid, f"{flag_of(name)} {memory} must be zero ({nothing}) or more")
        for name in ("header_timeout", "body_timeout", "idle_timeout", "grammar_timeout"):
            seconds = getattr(self, name)
            valid = math.isfinite(seconds) and seconds > 0
            require(valid, f"{flag_of(name)} {seconds} must be more than zero seconds")

    @property
    def schema_bytes(self) -> int:
        """Maximum bytes of a schema or a regular expression."""
        return int(self.max_schema_kb * KB)

    @property
    def store_bytes(self) -> int:
        """Maximum bytes of stored responses."""
        return int(self.responses_store_mb * MB)

    @property
    def answers_bytes(self) -> int:
        """Maximum bytes of remembered answers."""
        return int(self.answers_memory_mb * MB)

    @property
    def body_bytes(self) -> int:
        """Maximum bytes of a body."""
        return int(self.max_body_mb * MB)
