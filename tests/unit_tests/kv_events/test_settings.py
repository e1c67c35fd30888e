"""Settings of the event publisher: accepted flags and warnings."""

from __future__ import annotations

import logging
from contextlib import closing

import pytest

from arguments import parse_server_arguments
from megatron_ext.config import RequestParams
from megatron_ext.config.kv_events import (
    LONGEST_IPC_PATH,
    MAX_BLOCK_TOKENS,
    MAX_TOPIC_BYTES,
    KvEventsConfig,
    parse_endpoint,
)
from megatron_ext.errors import ConfigError
from megatron_ext.mcore.adapter import InferenceEngine
from megatron_ext.models.llm_engine import LLMEngine
from megatron_ext.prefix_cache.public_hash import event_salt
from megatron_ext.server.run import KvEventPublishers
from tests.unit_tests.support.kv_events import Worker, until
from tests.unit_tests.support.server import tiny_engine


def test_events_are_off_by_default():
    """RP-1: no socket, no observer."""
    settings = parse_server_arguments([]).server.kv_events
    assert settings == KvEventsConfig()
    assert KvEventPublishers(settings).publishers == []


@pytest.mark.parametrize(
    ("text", "bound", "loopback", "second"),
    [
        ("tcp://127.0.0.1:5557", True, True, "tcp://127.0.0.1:5558"),
        ("tcp://localhost:5557", True, True, "tcp://localhost:5558"),
        ("tcp://[::1]:1", True, True, "tcp://[::1]:2"),
        ("tcp://*:5557", True, False, "tcp://*:5558"),
        ("tcp://0.0.0.0:0", True, False, "tcp://0.0.0.0:*"),
        ("tcp://router.example:5557", False, False, "tcp://router.example:5558"),
        ("tcp://10.0.0.1:5557", False, False, "tcp://10.0.0.1:5558"),
    ],
)
def test_endpoints(text, bound, loopback, second):
    """A replica's port is that of the first one and its rank, as in vLLM."""
    endpoint = parse_endpoint(text)
    assert (endpoint.is_bound, endpoint.is_loopback, endpoint.of_replica(1)) == (bound, loopback, second)


def test_longest_socket_file():
    """SE-8: a path that the kernel would cut off is refused, in bytes."""
    longest = "ipc:///" + "x" * (LONGEST_IPC_PATH - 1)
    assert len(KvEventsConfig(longest, kv_events_replay_endpoint=longest).endpoints()) == 2
    for field in ("kv_events_endpoint", "kv_events_replay_endpoint"):
        for too_long in (longest + "x", longest[:-1] + "é"):
            with pytest.raises(ConfigError, match=rf"the path has {LONGEST_IPC_PATH + 1} bytes and must have at most"):
                KvEventsConfig(**{"kv_events_endpoint": longest, field: too_long})


@pytest.mark.parametrize(
    "text",
    [
        *("", "5557", "tcp://", "tcp://host", "tcp://:5557", "http://h:1", "tcp://*:x", "tcp://h:99999", "tcp://*:"),
        *("ipc://", "ipc://*", "ipc://events", "ipc://@abstract", "ipc:///tmp/", "ipc:///tmp/a\nb"),
    ],
)
def test_refuses_invalid_endpoints(text):
    with pytest.raises(ConfigError, match=r"--kv-events-endpoint.*must be tcp://HOST:PORT"):
        KvEventsConfig(text)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--kv-events-replay-endpoint tcp://127.0.0.1:1", "needs --kv-events-endpoint"),
        ("--kv-events-endpoint tcp://*:1 --kv-events-replay-endpoint tcp://far:1", "must be this machine's"),
        ("--kv-events-endpoint tcp://*:1 --kv-events-buffer-steps 0", "between 1 and"),
        ("--kv-events-states-endpoint tcp://127.0.0.1:1", "needs --kv-events-endpoint; give both"),
        (
            "--kv-events-endpoint tcp://*:1 --kv-events-states-replay-endpoint tcp://127.0.0.1:1",
            "needs --kv-events-states-endpoint",
        ),
        (
            "--kv-events-endpoint tcp://*:1 --kv-events-states-endpoint tcp://*:2 "
            "--kv-events-replay-endpoint tcp://127.0.0.1:3",
            "blocks and states are either both replayed or neither",
        ),
        (f"--kv-events-endpoint tcp://*:1 --kv-events-topic {'x' * (MAX_TOPIC_BYTES + 1)}", "has 513 bytes"),
        (
            f"--kv-events-endpoint tcp://*:1 --inference-dynamic-batching-block-size {2 * MAX_BLOCK_TOKENS}",
            "blocks that are published have at most 65536 tokens",
        ),
        (
            "--kv-events-endpoint tcp://*:1 --no-inference-dynamic-batching-enable-prefix-caching",
            "without a cache there are no events",
        ),
    ],
)
def test_contradictions(words, message):
    with pytest.raises(ConfigError, match=message):
        parse_server_arguments(words.split())


def test_warns_of_addresses_of_other_machines(caplog):
    """RP-1: token ids leave the process."""
    with caplog.at_level(logging.WARNING), closing(KvEventPublishers(KvEventsConfig("tcp://*:0"), 2)) as events:
        assert "token ids of all cached prompts" in caplog.text
        assert "tcp://*:* is reachable from other machines" in caplog.text
        assert len({publisher.blocks.endpoint for publisher in events.publishers}) == 2


@pytest.mark.parametrize(
    ("mode", "endpoint", "said"),
    [
        (0o700, "tcp://127.0.0.1:0", "every user of this machine can connect to tcp://127.0.0.1:*"),
        (0o710, "ipc://{}/events", "chmod 700"),
        (0o700, "ipc://{}/events", None),
    ],
)
def test_warns_of_endpoints_that_other_users_can_read(short_path, caplog, mode, endpoint, said):
    """SE-8: the loopback address is every user's; a socket file belongs to the users that can enter its directory."""
    short_path.chmod(mode)
    with caplog.at_level(logging.WARNING), closing(KvEventPublishers(KvEventsConfig(endpoint.format(short_path)))):
        assert (said in caplog.text) if said else (caplog.text == "")


def answers(engine: InferenceEngine) -> list[tuple[tuple[int, ...], int]]:
    """Tokens and skipped tokens of prompts that share prefixes, one after the other."""
    records = []
    for name, prompt in enumerate([[*range(3, 40)], [*range(3, 36), 7, 7, 7], [*range(3, 40)]]):
        engine.add_request(name, prompt, RequestParams(num_tokens_to_generate=20, cache_salt="tenant"))
        while engine.has_unfinished_requests():
            records += engine.step_modern()["finished_request_records"]
    return [(record.generated_tokens, record.skipped_prefill_token_count) for record in records]


def test_an_engine_computes_the_same_with_events():
    """RP-1: tokens and counts are those of a run without; what is told are the tokens of prompts and answers."""
    silent = answers(tiny_engine())
    host = "tcp://127.0.0.1:0"
    config = KvEventsConfig(host, "t", host, 100, host, host)
    with closing(KvEventPublishers(config)) as events:
        engine = tiny_engine()
        events.attach(LLMEngine(engine))
        assert answers(engine) == silent
        follower = Worker(events.publishers[0], engine.core.scheduler.cache)
        until(follower.has_all)
    told = follower.reader.blocks.values()
    assert any(block.tokens == tuple(range(3, 19)) and block.extra == (event_salt("tenant"),) for block in told)
    assert any(block.tokens[-5:] == silent[0][0][6:11] for block in told), "an answer's tokens are told too"
