"""Simulator beside the engine: recorded sessions, made small, skip the same tokens in both, request by request.

The engine computes the embedded model; its clock is the simulated one, so that requests come in the same order.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from benchmarks.cases import Run, case
from megatron_ext.config import BatchingConfig, CacheConfig, EvictionPolicyName, RequestParams, SourceConfig
from megatron_ext.engine.core import EngineCore
from megatron_ext.files import JsonObject
from megatron_ext.mcore.assemble import build_engine
from megatron_ext.models.load import LoadedModel, load_model
from megatron_ext.scheduling.request_inputs import RequestInputs
from megatron_ext.simulation.formats import FIRST_SYNTHETIC_ID, TraceReader, list_of, objects_of_lines, open_trace
from megatron_ext.simulation.replay import Outcome, Replay
from megatron_ext.simulation.settings import Machine
from megatron_ext.simulation.trace import Turn

TRACES = Path(__file__).parent / "traces"
SESSIONS = TRACES / "coding_agents_20.jsonl.xz"
BLOCK_SIZE, LONGEST_PROMPT, LONGEST_SEQUENCE = 16, 4096, 8192  # tokens
MACHINE = Machine(overhead=0.1)  # slow enough for sessions to overlap


@dataclass(frozen=True)
class Memory:
    """Sizes of the pools, or of the memory that blocks and snapshots share."""

    blocks: int | None = None
    slots: int | None = None
    gib: float | None = None  # of blocks; with snapshots a quarter more

    def __str__(self) -> str:
        return f"{self.blocks:,} blocks, {self.slots:,} slots" if self.gib is None else f"{self.gib:g} GiB"


class SmallSessions:
    """Sessions whose prompts have at most `LONGEST_PROMPT` tokens: k blocks of the file become one of 16 tokens.

    Prompts keep all their blocks; what follows the last complete one, and answers, are shorter by the same factor.
    """

    def __init__(self) -> None:
        self._groups: dict[tuple[int, ...], int] = {}

    def small(self, session: JsonObject) -> JsonObject:
        """Return a session made small."""
        self._groups.clear()
        size = session["block_size"]
        assert isinstance(size, int)
        longest = max(_count(one["in"]) for one in _requests(list_of(session["requests"], dict)))
        k = 1
        while _scaled(longest, k * size) > LONGEST_PROMPT:
            k += 1
        return {**session, "block_size": BLOCK_SIZE, "requests": self._entries(session["requests"], k, size)}

    def _entries(self, entries: object, k: int, size: int) -> list[JsonObject]:
        return [
            {**one, "requests": self._entries(one["requests"], k, size)}
            if "requests" in one
            else {
                **one,
                "in": _scaled(_count(one["in"]), k * size),
                "out": max(1, _scaled(_count(one["out"]), k * size)),
                "hash_ids": self._grouped(list_of(one["hash_ids"], int), k),
            }
            for one in list_of(entries, dict)
        ]

    def _grouped(self, hashes: Sequence[int], k: int) -> list[int]:
        groups = [tuple(hashes[i : i + k]) for i in range(0, len(hashes) - k + 1, k)]
        return [self._groups.setdefault(group, len(self._groups)) for group in groups]


def _requests(entries: Iterable[JsonObject]) -> Iterable[JsonObject]:
    for one in entries:
        yield from _requests(list_of(one["requests"], dict)) if "requests" in one else (one,)


def _count(value: object) -> int:
    assert isinstance(value, int), value
    return value


def _scaled(tokens: int, per_block: int) -> int:
    return tokens * BLOCK_SIZE // per_block


def small_turns(path: Path, ids: Sequence[str] | None = None) -> tuple[list[Turn], list[str]]:
    """Return the turns of small sessions, and the id of each turn's session.

    Args:
        path: File of sessions.
        ids: Ids of the sessions to take; None for all.
    """
    reader, turns, names = TraceReader(0.2), [], []
    with open_trace(path) as file:
        for _, session in objects_of_lines(file, str(path)):
            if ids is None or session["id"] in ids:
                found = reader.read(SmallSessions().small(session))
                turns += found
                names += [str(session["id"])] * len(found)
    return turns, names


class EngineReplay(Replay):
    """Replay in which an engine computes each step; its answers are as long as the trace's, and others.

    Args:
        turns: Turns of all sessions.
        core: Engine core without requests.
        machine: Cost model of a step.
        ended: Called when a request has ended.
    """

    def __init__(
        self, turns: Sequence[Turn], core: EngineCore, machine: Machine, ended: Callable[[], object] = lambda: None
    ) -> None:
        super().__init__(turns, core.scheduler.limits, None, None, machine)
        self.scheduler, self._core, self._ended = core.scheduler, core, ended
        last = max(piece[-1] for turn in turns for piece in turn.prompt)
        self._tokens = random.Random(0).choices(range(1, 4096), k=last - FIRST_SYNTHETIC_ID + 1)

    def take(self, place: int) -> bool:
        """Hand a turn to the engine."""
        turn = self.turns[place]
        prompt = tuple(self._tokens[one - FIRST_SYNTHETIC_ID] for one in turn.tokens())
        params = RequestParams(num_tokens_to_generate=len(turn.answer), temperature=1.0, top_k=0, ignore_eos=True)
        self._core.add(place, RequestInputs(prompt, params))
        return True

    def step(self) -> None:
        """Take one step of the engine; simulated time passes."""
        step = self._core.compute()
        if step.chunks:
            self.now += self.machine.seconds(step.chunks, self.scheduler.limits.costs)
            self.outcome.steps += 1
        for record in self._core.report(step):
            assert record.finish_reason == "length", record
            self.end(record.request_id, record.skipped_prefill_token_count)
            self._ended()


def build_core(loaded: LoadedModel, policy: str, memory: Memory) -> EngineCore:
    """Build an engine of the embedded model."""
    config = dataclasses.replace(loaded.config, max_position_embeddings=LONGEST_SEQUENCE)
    batching = BatchingConfig(memory.gib, memory.blocks, block_size=BLOCK_SIZE, max_requests=8, max_tokens=1024)
    cache = CacheConfig(eviction_policy=policy, snapshot_slots=memory.slots)
    return build_engine(loaded.model, config, loaded.tokenizer, batching, cache, dtype=loaded.dtype).core


def compare(
    turns: Sequence[Turn],
    loaded: LoadedModel,
    policy: str,
    memory: Memory,
    ended: Callable[[], object] = lambda: None,
) -> tuple[Outcome, Outcome]:
    """Run turns through the simulator and through an engine.

    Args:
        turns: Turns of small sessions.
        loaded: The embedded model.
        policy: Eviction policy.
        memory: Sizes of the pools.
        ended: Called when the engine has served a request.

    Returns:
        The outcomes of the simulator and of the engine.
    """
    core = build_core(loaded, policy, memory)
    replay = Replay(turns, core.scheduler.limits, EvictionPolicyName(policy), memory.slots, MACHINE)
    return replay.run(), EngineReplay(turns, core, MACHINE, ended).run()


@case("simulation", quick={"policies": ("lru",), "gib": (0.02,), "sessions": ("trace_0584",)})
def truth(
    run: Run,
    policies: tuple = ("lru", "ref_zero"),
    gib: tuple = (0.033, 0.5),
    splits: bool = False,
    blocks: tuple = (1_500, 12_000),
    slots: tuple = (60, 1_200),
    sessions: tuple = ("all",),
) -> None:
    """Tokens that recorded sessions skip in the simulator and in the engine, request by request, all at the same time.

    Of each session 40 requests, k blocks made one of 16 tokens, so that its longest prompt has 4,096 tokens at most.
    `gib` are memories that blocks and snapshots share, the default; with `splits`, they have `blocks` and `slots`.
    """
    turns, names = small_turns(SESSIONS, None if sessions == ("all",) else sessions)
    loaded = load_model(SourceConfig(), {})
    memories = [Memory(*one) for one in zip(blocks, slots, strict=True)] if splits else [Memory(gib=one) for one in gib]
    with tqdm(total=len(turns) * len(policies) * len(memories), unit="request", disable=None) as progress:
        for memory in memories:
            for policy in policies:
                simulated, computed = compare(turns, loaded, policy, memory, progress.update)
                column = f"{policy}, {memory}"
                for name in dict.fromkeys(names):
                    places = [i for i, one in enumerate(names) if one == name]
                    equal = [simulated.skipped[i] == computed.skipped[i] for i in places]
                    share = sum(computed.skipped[i] for i in places) / sum(computed.prompt[i] for i in places)
                    shown = {"requests": len(places), f"{column}: skipped": share, f"{column}: equal": all(equal)}
                    run.row(name, shown)
                evicted = [one.statistics.use.blocks_evicted for one in (simulated, computed) if one.statistics]
                run.row("all", {"requests": len(turns), f"{column}: skipped": computed.skipped_share})
                run.row("all", {f"{column}: equal": simulated.skipped == computed.skipped})
                run.remark(f"{column}: {evicted[1]:,} blocks evicted, {evicted[0]:,} in the simulator")
