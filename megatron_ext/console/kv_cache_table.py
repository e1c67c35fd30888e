"""Table of the KV cache config on standard output."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import IO, TYPE_CHECKING, cast

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megatron_ext.console.terminal import Output, printable
from megatron_ext.memory.budget import KVCacheConfig
from megatron_ext.memory.capacity import WorldKVCacheConfig

if TYPE_CHECKING:
    from megatron_ext.models.engine_args import DryRun
    from megatron_ext.models.llm_engine import LLMEngine

_FILE_WIDTH = 80  # characters
_LENGTHS = (4096, 32768)  # tokens of requests whose number is shown


def make_console(quiet: bool, output: Output | None = None) -> Console:
    """Return a console on standard output that never raises; with the width of a file if it is not a terminal."""
    output = output or Output(sys.stdout)
    file = cast("IO[str]", output)  # rich uses `write`, `flush`, `isatty` and `encoding`
    return Console(file=file, highlight=False, quiet=quiet, width=None if output.isatty() else _FILE_WIDTH)


def counted(number: int, name: str) -> str:
    """Return a number of things with their name, in the plural unless it is one."""
    return f"{number:,} {name}" if number == 1 else f"{number:,} {name}s"


def print_kv_cache_config(
    geometry: KVCacheConfig,
    model: str,
    console: Console,
    request_state_bytes: int = 0,
    positions: int | None = None,
    others: Mapping[str, str] | None = None,
) -> None:
    """Print the engine's capacity (EX-6), and the maximum state memory of the longest request (LA-4).

    Args:
        geometry: KV cache config of the engine.
        request_state_bytes: State bytes of the longest request; 0 is not shown.
        positions: Positions that the model has; None if no layer depends on them.
        others: Further rows; those with an empty text are not shown.
    """
    table = Table("engine", escape(printable(model)), show_lines=False)
    blocks, block = f"{geometry.blocks:,} blocks", f"{geometry.block_size_tokens} tokens"
    at_most = "at most " if geometry.slabs else ""
    table.add_row("KV cache", f"{at_most}{blocks} of {block}, {geometry.block_bytes:,} bytes each")
    is_pool = geometry.max_model_len == geometry.blocks * geometry.block_size_tokens
    held = ", as many as the KV cache holds" if is_pool else ""
    known = "" if positions is None else f"; the model has {positions:,} positions"
    table.add_row("longest sequence", f"{geometry.max_model_len:,} tokens{held}{known}")
    if geometry.state_bytes:
        cost = f", as much as the KV of {geometry.state_in_kv_tokens} tokens" if geometry.state_in_kv_tokens else ""
        table.add_row("live states", f"{geometry.live_states:,} of {geometry.state_bytes:,} bytes each{cost}")
        table.add_row("snapshots", f"{at_most}{geometry.snapshot_slots:,} slots of the same size")
    if geometry.slabs:
        layout = geometry.slabs
        held = f"{counted(layout.blocks_per_slab, 'block')} or a snapshot each"
        table.add_row("shared memory", f"{layout.slabs:,} slabs of {geometry.slab_bytes:,} bytes: {held}")
    if geometry.draft_states:
        table.add_row("states after drafts", f"{geometry.draft_states:,} of the same size")
    drafts = geometry.draft_layers
    if drafts is not None:
        states = f", {drafts.states:,} states of {drafts.state_bytes:,} bytes" if drafts.states else ""
        table.add_row("drafting layers", f"{blocks} of {drafts.block_bytes:,} bytes{states}, in the same budget")
    if geometry.log_prob_bytes:
        table.add_row("prompt log-probs", f"{geometry.log_prob_bytes:,} bytes with each block, in the same budget")
    if request_state_bytes:
        table.add_row("states of one request", f"at most {request_state_bytes:,} bytes, its snapshots included")
    shortest = geometry.shortest_prompt_that_can_hit
    hits = "nothing is skipped" if shortest is None else f"prompts of at least {shortest} tokens can hit"
    table.add_row("prefix cache", hits)
    for name, text in (others or {}).items():
        if text:
            table.add_row(name, text)
    if isinstance(geometry, WorldKVCacheConfig):
        _add_ranks(table, geometry)
    console.print(table)


def print_engine(engine: LLMEngine, model: str, console: Console) -> None:
    """Print the capacity of an engine that has started, its operators by backend (CU-3), and facts about weights."""
    usual, *others = engine.operators
    rest = "".join(f"; {name} for {', '.join(engine.operators[name])}" for name in others)
    packed = f"{engine.bytes_held_twice:,} bytes beside the originals" if engine.bytes_held_twice else ""
    rows = {"operators": f"{usual}{rest}", "packed weights": packed, "drafts": engine.draft_exactness}
    print_kv_cache_config(engine.geometry, model, console, engine.request_state_bytes, engine.positions, rows)


def print_dry_run(dry: DryRun, console: Console) -> None:
    """Print the plan of an engine, as a start with the same memory does, and how many requests fit."""
    plan, world = dry.plan, dry.plan.world
    print_kv_cache_config(world, dry.name, console, plan.request_state_bytes, positions=plan.positions)
    dtype = str(dry.dtype).removeprefix("torch.")
    table = Table("memory", "nothing is loaded", show_lines=False)
    table.add_row("weights", f"{dry.weight_bytes:,} bytes ({dtype})")
    table.add_row("pools", f"{world.pool_bytes:,} bytes, and {plan.activation_bytes:,} bytes for a step")
    left = dry.free_bytes - dry.weight_bytes - world.pool_bytes - plan.activation_bytes
    table.add_row("free now", f"{dry.free_bytes:,} bytes, of which {left:,} bytes are left")
    for tokens in _LENGTHS:
        fit = dry.requests_at_once(tokens)
        table.add_row(f"at once, {tokens:,} tokens", counted(fit, "request") if fit else "too long for one")
    console.print(table)


def _add_ranks(table: Table, geometry: WorldKVCacheConfig) -> None:
    """Add one row per rank: a block and a state belong to one replica, and are sharded over its ranks."""
    for one in geometry.ranks:
        parts = [("a block", one.block_bytes), ("a state", one.state_bytes)]
        held = [f"{count:,} bytes of {what}" for what, count in parts if count]
        table.add_row(f"rank {one.rank}", ", ".join([*held, f"pools of {one.pool_bytes:,} bytes"]))
    replicas = f", {geometry.replicas} replicas of all of the above" if geometry.replicas > 1 else ""
    table.add_row("all ranks", f"pools of {geometry.world_pool_bytes:,} bytes{replicas}")
