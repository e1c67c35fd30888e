"""CU-22: block tables stay on the device, and a step sends the rows that changed."""

from __future__ import annotations

import random

import pytest
import torch

from megatron_ext.prefix_cache.block_pool import BlockId
from megatron_ext.runner.cuda_graphs.input_buffers import BlockTables
from tests.unit_tests.runner.short_models import CONFIGS
from tests.unit_tests.support.driver import make_prompt
from tests.unit_tests.support.launches import LaunchCounter
from tests.unit_tests.support.padded import PaddedHybridDriver

PADDING, WIDTH, SLOTS = 99, 12, 5


def test_rows_on_the_device_are_the_tables_of_the_slots():
    """CU-22: tables that grow, are replaced by shorter ones, and change places, over many steps."""
    source, tables = random.Random(3), BlockTables(SLOTS, WIDTH, PADDING, torch.device("cpu"))
    known = {slot: (BlockId(slot),) for slot in range(SLOTS)}
    for _ in range(200):
        slots = source.sample(range(SLOTS), source.randrange(1, SLOTS + 1))
        changed = {slot for slot in slots if source.random() < 0.4}
        for slot in changed:
            is_new = source.random() < 0.3 or len(known[slot]) == WIDTH
            known[slot] = (*(() if is_new else known[slot]), BlockId(source.randrange(90)))
        tables.rows.of(slots, [known[slot] for slot in slots])
        tables.send_rows()
        found = tables.gather(torch.tensor(slots), WIDTH)
        for row, slot in zip(found.tolist(), slots, strict=True):
            assert row == [*known[slot], *[PADDING] * (WIDTH - len(known[slot]))]


def test_bytes():
    """CU-22: nothing for tables that are the same, four bytes a block and eight a row for others."""
    tables = BlockTables(SLOTS, 2, PADDING, torch.device("cpu"))
    one, other = (BlockId(1), BlockId(2)), (BlockId(3),)
    tables.rows.of([0, 1], [one, other])
    assert tables.send_rows() == 2 * (8 + 2 * 4)
    tables.rows.of([1, 0], [other, one])
    assert tables.send_rows() == 0
    tables.rows.of([0, 1], [one, (*other, BlockId(4))])
    assert tables.send_rows() == 8 + 2 * 4


def test_tables_are_sent_and_gathered_as_they_are_read():
    """CU-24: int32 in both; a copy and a write by slot beside the graph, a gather in it, and no conversion."""
    tables = BlockTables(SLOTS, WIDTH, PADDING, torch.device("cpu"))
    tables.rows.of([0, 3], [(BlockId(1), BlockId(2)), (BlockId(2**31 - 1),)])
    with LaunchCounter() as beside:
        tables.send_rows()
    with LaunchCounter() as captured:
        found = tables.gather(torch.tensor([3]), 2)
    assert found.dtype == torch.int32
    assert found.tolist() == [[2**31 - 1, PADDING]]
    assert (beside.launches.total(), captured.launches.total()) == (2, 1)


@pytest.fixture
def sent(monkeypatch) -> list[int]:
    """Bytes of tables that each step has sent."""
    found, send = [], BlockTables.send_rows
    monkeypatch.setattr(BlockTables, "send_rows", lambda self: found.append(send(self)) or found[-1])
    return found


def test_decodes_send_a_table_when_they_begin_a_block(get_oracle, sent):
    """CU-22: blocks of 16 tokens; a prompt of 20, then 30 decodes, of which those at 32 and 48 begin a block."""
    driver = PaddedHybridDriver(get_oracle("hybrid").model, CONFIGS["hybrid"], num_cuda_graphs=1, max_requests=2)
    driver.wait_for_tokens()
    driver.add(0, make_prompt(20), num_tokens_to_generate=30)
    driver.run()
    assert len(driver.buckets) == 30
    assert sum(count > 0 for count in sent) == 4  # padding, the prompt, and the blocks that begin at 32 and 48
