"""Guarantees of the Triton kernels beyond the contract: padded steps, few queries at once, windows, and bits.

A step as a CUDA graph replays it has more sequences, a wider block table and a longer token axis than there is work
for; pools hold NaN wherever no sequence has written.
"""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.ops import backends, triton
from megatron_ext.ops.paged_attention import PAGED_ATTENTION, PagedBatch, paged_attention, reference
from megatron_ext.ops.triton.kernel_registry import TYPE_NAMES, Config, watch
from tests.unit_tests.ops.backends import interpreted, usable
from tests.unit_tests.ops.oracles import assert_close
from tests.unit_tests.ops.test_paged_attention import SCALE, Step
from tests.unit_tests.support.kernel_races import no_shared_cells

if triton.NAME not in usable(PAGED_ATTENTION):
    pytest.skip("no Triton here", allow_module_level=True)
pytestmark = [*interpreted(triton.NAME)]
kernels = importlib.import_module("megatron_ext.ops.paged_attention.kernels")
merging = importlib.import_module("megatron_ext.ops.paged_attention.kernels_merge")
COVERED = ("paged_decode_split", "merge_splits", "paged_prefill")  # here and in test_paged_attention.py


@pytest.fixture(autouse=True)
def backend() -> Iterator[None]:
    with PAGED_ATTENTION.forced(triton.NAME):
        yield


DECODES = [(1, keys) for keys in (1, 2, 15, 16, 17, 63, 64, 65, 513)]
MIXED = [(1, 17), (1, 65), (15, 15), (3, 63), (65, 65), (1, 33)]


@pytest.mark.parametrize(("head_size", "heads", "block"), [(32, (6, 2), 16), (80, (3, 3), 48), (256, (5, 1), 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_head_sizes_and_types(head_size: int, heads: tuple[int, int], block: int, dtype: torch.dtype) -> None:
    """CU-2: decodes and prefills, groups of heads, blocks that are a multiple of 16."""
    pool = Step(MIXED, 2, *heads, head_size, dtype, block)
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    assert_close("mixed", pool.attend().float(), pool.expected().float(), atol=tolerance, rtol=tolerance)


@contextlib.contextmanager
def programs(monkeypatch: pytest.MonkeyPatch, **values: int) -> Iterator[None]:
    """Choose grids and room for partial sums by constants of the launches."""
    with monkeypatch.context() as patched:
        for name, value in values.items():
            patched.setattr(kernels, name, value)
        with no_shared_cells() if triton.is_interpreted() else contextlib.nullcontext():
            yield


@pytest.mark.parametrize(("window", "longest"), [(None, 8750), (700, 1100)])
def test_programs_take_turns_over_the_spans_of_a_decode(
    window: int | None, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CU-2: whichever programs compute and merge spans, the bits are the same, with room for each or for groups."""
    pool = Step([(1, longest), (1, 30), (2, 600)], 3, 2, 1)
    found = []
    for turns, slots in ((16, 32), (1, 2)):
        few = {"FEWEST_A_TILE": turns, "ENOUGH_PROGRAMS": 1, "FEWEST_SLOTS": slots, "PARTIAL_BYTES": 0}
        with programs(monkeypatch, **few):
            found.append(pool.attend(window=window))
    assert_close("decodes", found[0], pool.expected(window), atol=1e-5, rtol=1e-5)
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize("window", [None, 4090])
def test_keys_of_a_short_prefill_are_split(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """CU-2: a suffix after cached keys is computed by spans, with the bits of one program for all keys."""
    pool = Step([(1, 9), (2, 70), (3, 4110)], 1, 2, 1)
    found = []
    for tiles in (0, 192):
        with programs(monkeypatch, FEW_TILES=tiles), watch() as launches:
            found.append(pool.attend(window=window))
        assert [one.kernel for one in launches].count("merge_splits") == (2 if tiles else 1)
    assert_close("warm", found[0], pool.expected(window), atol=1e-5, rtol=1e-5)
    assert torch.equal(found[0], found[1])


DTYPES = {name: dtype for dtype, name in TYPE_NAMES.items()}
ARCHS = dict.fromkeys(kernels.MANY_BY_WARP_GROUPS, (80, kernels.WARP_GROUPS))
SIZES = [
    (name, channels, arch)
    for types, channels in kernels.MANY
    for name in types
    for arch in ARCHS.get((types, channels), (kernels.WARP_GROUPS,))
]


@pytest.mark.kernels
@pytest.mark.parametrize(("name", "channels", "arch"), SIZES)
def test_every_configuration(name: str, channels: int, arch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """CU-2: every compiled configuration is right, with the same bits whether keys of a prefill are split."""
    monkeypatch.setattr(triton, "architecture", lambda device: arch)
    size = channels if channels < 64 else channels - 16
    pool = Step([*MIXED, (2, kernels.PREFILL_SPAN + 4)], 2, head_size=size, dtype=DTYPES[name])
    with watch() as launches:
        got = pool.attend()
    with programs(monkeypatch, FEW_TILES=0):
        assert torch.equal(pool.attend(), got)
    assert {(launch.kernel, launch.config) for launch in launches} == set(launched(name, channels, arch))
    tolerance = 1e-5 if name == "fp32" else 0.02
    assert_close("mixed", got.float(), pool.expected().float(), atol=tolerance, rtol=tolerance)


def launched(name: str, channels: int, arch: int) -> Iterator[tuple[str, Config]]:
    """Kernels that heads of that size launch on an architecture, with their configs."""
    key = next(types for types, _ in kernels.MANY if name in types), channels
    yield from (("paged_prefill", kernels.many(*key, arch)), ("paged_decode_split", kernels.FEW[key]))
    yield "merge_splits", merging.SUMS[channels]


def test_those_are_all_configurations() -> None:
    """CU-3: every compiled configuration is tested."""
    tested = {(*one, name) for name, channels, arch in SIZES for one in launched(name, channels, arch)}
    every = (kernels.paged_decode_split, merging.merge_splits, kernels.paged_prefill)
    assert {(kernel.name, config, types["T"]) for kernel in every for config, types in kernel.variants()} == tested


@pytest.mark.parametrize("arch", [80, 90, 100, 120])
def test_tiles_of_warp_groups_are_for_their_architecture(arch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """CU-25: a launch takes the tile of the device; others than sm_90 get the smaller ones."""
    monkeypatch.setattr(triton, "architecture", lambda device: arch)
    pool = Step([(3, 5)], 0, 1, 1, 128, torch.bfloat16)
    with watch() as launches:
        pool.attend()
    (tile,) = [one.config["M"] for one in launches if one.kernel == "paged_prefill"]
    assert tile == (128 if arch == 90 else 64)
    assert [kernels.many(kernels.NARROW, size, arch)["M"] for size in (64, 256)] == [128, 64 if arch == 90 else 32]


def test_lengths_of_decodes() -> None:
    """CU-2: around blocks, tiles of keys and spans."""
    pool = Step(DECODES, len(DECODES))
    assert_close("decodes", pool.attend(), pool.expected(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("few", [0, 4])
def test_several_queries_may_decode(few: int) -> None:
    """K + 1 queries that verify K proposed tokens; one whose first queries end in an earlier span than its last."""
    pool = Step([(4, 17), (3, 514), (5, 65), (5, 5)], few)
    assert_close("verified", pool.attend(), pool.expected(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [1, 5, 16, 64, 500])
def test_windows(window: int) -> None:
    """FA-4 in the kernels: the last keys of each query only, in both kernels."""
    pool = Step([(1, 3), (1, 65), (2, 514), (1, 600), (5, 5), (40, 63), (65, 65)], 4)
    assert_close("window", pool.attend(window=window), pool.expected(window), atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("fixed_order_dot")
def test_a_long_window_changes_no_bit() -> None:
    pool = Step(MIXED, 2)
    assert torch.equal(pool.attend(window=65), pool.attend())


def padded(
    batch: PagedBatch, q: Tensor, few: int, sequences: int, blocks: int, tokens: int
) -> tuple[Tensor, PagedBatch]:
    """Step as in a graph: decodes without keys, prefills without queries, a wide table, tokens after the last row."""
    decodes, prefills = few - batch.num_decode, sequences - few - len(batch.query_lengths) + batch.num_decode
    own = batch.num_decode
    table = F.pad(batch.block_table, (0, blocks))
    table = torch.cat([table[:own], table.new_zeros(decodes, table.shape[1]), F.pad(table[own:], (0, 0, 0, prefills))])
    lengths = (*batch.query_lengths[:own], *[1] * decodes, *batch.query_lengths[own:], *[0] * prefills)
    keys = (*batch.kv_lengths[:own], *[0] * decodes, *batch.kv_lengths[own:], *[0] * prefills)
    starts = torch.tensor([0, *lengths]).cumsum(0)
    q = torch.cat([q[:own], q.new_full((decodes, *q.shape[1:]), math.nan), q[own:]])
    q = torch.cat([q, q.new_full((tokens, *q.shape[1:]), math.nan)])
    return q, PagedBatch(few, lengths, keys, batch.block_size, table, starts, torch.tensor(keys))


@pytest.mark.usefixtures("fixed_order_dot")
@pytest.mark.parametrize(("few", "sequences", "blocks", "tokens"), [(4, 12, 30, 7), (2, 6, 40, 0), (8, 20, 1, 64)])
def test_padding_changes_no_bit(few: int, sequences: int, blocks: int, tokens: int) -> None:
    """CU-4: padding is not read and gives zeros; all other outputs are unchanged, bit for bit."""
    pool = Step(MIXED, 2)
    plain, batch = pool.attend(), pool.batch()
    q, batch = padded(batch, pool.q, few, sequences, blocks, tokens)
    got = paged_attention(q, pool.key_cache, pool.value_cache, batch, scale=SCALE)
    real = [0, 1, *range(few, few + len(plain) - 2)]
    assert torch.equal(got[real], plain)
    assert not got[[i for i in range(len(got)) if i not in real]].any()


def test_the_grid_depends_on_shapes_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """CU-5: two steps of one shape launch the same grids and configurations, whatever their lengths."""
    grids = []
    for kernel in (kernels.paged_decode_split, merging.merge_splits, kernels.paged_prefill):
        function = kernel.function
        stand_in = type("Grids", (), {"__getitem__": lambda _, grid, f=function: grids.append(grid) or f[grid]})()
        monkeypatch.setitem(vars(kernel), "function", stand_in)
    seen = []
    for rows in ([(1, 17), (1, 65), (15, 15)], [(1, 40), (1, 2), (9, 33)]):
        pool = Step(rows, 2)
        q, batch = padded(pool.batch(), pool.q, 4, 8, 8 - pool.batch().block_table.shape[1], 20 - len(pool.q))
        with watch() as launches:
            paged_attention(q, pool.key_cache, pool.value_cache, batch, scale=SCALE)
        seen.append((tuple(grids), tuple(launches)))
        grids.clear()
    assert seen[0] == seen[1]


@pytest.mark.usefixtures("fixed_order_dot")
def test_neighbours_and_cuts_change_no_bit() -> None:
    """CU-3, HY-14, TE-1: the place of a cut and the neighbouring sequences change no bit."""
    pool = Step([(100, 100)], 0, 6, 2)
    whole, queries = pool.attend(), pool.q
    for first in (1, 16, 63, 99):
        pool.rows, pool.q = [(100 - first, 100)], queries[first:]
        assert torch.equal(pool.attend(), whole[first:]), first
    pool = Step(DECODES, len(DECODES))
    together = pool.attend()
    for i, row in enumerate(DECODES):
        alone = Step(DECODES, len(DECODES))
        alone.rows, alone.tables, alone.q = [row], [pool.tables[i]], pool.q[i : i + 1]
        assert torch.equal(alone.attend(decode_rows=1), together[i : i + 1]), row


def test_where_there_is_no_kernel_the_reference_computes_and_says_so_once(capsys: pytest.CaptureFixture[str]) -> None:
    """CU-3: heads of more than 256 channels."""
    backends.log_once.cache_clear()
    pool = Step([(1, 17), (3, 5)], 1, head_size=272)
    for window in (None, 4):
        assert_close("large", pool.attend(window=window), pool.expected(window))
    assert capsys.readouterr().err.count("heads of 272 channels") == 1
    with PAGED_ATTENTION.forced("reference"):
        on_host = reference.paged_attention(pool.q, pool.key_cache, pool.value_cache, pool.batch(), scale=SCALE)
        assert_close("reference", pool.attend(), on_host)
