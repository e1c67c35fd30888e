"""KV-1, EX-3: content keys that no perturbation, salt or layout of fields can forge."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from megatron_ext.prefix_cache.hash_chain import HASH_BYTES, HashChain, hash_blocks, packed_tokens, root_hash

ROOT = root_hash([b"model"])
BLOCK = 4
TOKENS = packed_tokens([31, 7, 12, 90_000, 5, 5, 5, 5, 0, 1, 2, 3])


def block_hashes(tokens=TOKENS, root=ROOT, block_size=BLOCK):
    return hash_blocks(root, tokens, block_size)


def test_only_complete_blocks_have_a_digest():
    """KV-1, KV-12: lengths around the block."""
    for length, blocks in ((0, 0), (1, 0), (3, 0), (4, 1), (5, 1), (7, 1), (8, 2)):
        assert len(block_hashes(TOKENS[:length])) == blocks
    assert all(len(block_hash) == HASH_BYTES for block_hash in block_hashes())


@pytest.mark.parametrize("position", range(12))
def test_one_changed_token_changes_its_block_and_all_after_it(position):
    """KV-1: the chain carries every difference on."""
    changed = [token + (index == position) for index, token in enumerate(TOKENS)]
    same = [a == b for a, b in zip(block_hashes(), block_hashes(changed), strict=True)]
    first = position // BLOCK
    assert same == [index < first for index in range(3)]


@pytest.mark.parametrize("multiple", [1, 2, -1, 1000])
@pytest.mark.parametrize("base", [31, 33, 257, 65_537])
@pytest.mark.parametrize("position", range(11))
def test_collisions_of_polynomial_hashes_have_different_hashes(position, base, multiple):
    """KV-1: adding m * base to one token and taking m from the next leaves a polynomial hash of that base as it was."""
    forged = [token + 10**8 for token in TOKENS]
    honest = list(forged)
    forged[position] += multiple
    forged[position + 1] -= multiple * base
    assert block_hashes(forged)[(position + 1) // BLOCK] != block_hashes(honest)[(position + 1) // BLOCK]
    assert block_hashes(forged)[-1] != block_hashes(honest)[-1]


def test_fields_of_the_root_cannot_run_into_each_other():
    """KV-1, EX-3: salts, models and tokens shifted across the borders of fields."""
    layouts = [
        [b"model", b"salt"],
        [b"models", b"alt"],
        [b"modelsalt"],
        [b"modelsalt", b""],
        [b"", b"modelsalt"],
        [b"salt", b"model"],
        [b"model"],
        [b"model", b""],
        [b"model", b"salt", b""],
        [],
        [b""],
    ]
    assert len({root_hash(fields) for fields in layouts}) == len(layouts)


def test_a_root_is_never_a_block():
    """KV-1: the domains are apart: bytes that make a block's input do not make that block hash as a root."""
    block = block_hashes()[0]
    packed = b"".join(token.to_bytes(4, "little") for token in TOKENS[:4])
    assert root_hash([ROOT + packed]) != block
    assert root_hash([ROOT, packed]) != block


def test_a_chain_hashes_each_block_once(monkeypatch):
    """KV-1: computed once per request."""
    from megatron_ext.prefix_cache import hash_chain

    hashed = []
    original = hash_chain._hashes_of_blocks

    def counting(*arguments):
        result = original(*arguments)
        hashed.append(len(result))
        return result

    monkeypatch.setattr(hash_chain, "_hashes_of_blocks", counting)
    chain = HashChain(ROOT, BLOCK)
    for before, after in pairwise(range(0, 41, 3)):
        chain.extend(packed_tokens(range(before)))
        chain.extend(packed_tokens(range(after)))
    assert sum(hashed) == len(chain._block_hashes)


@pytest.mark.parametrize("block_size", [3, 16, 300, 2_048, 3_000])
@pytest.mark.parametrize("length", [2_047, 2_048, 2_049, 7_001])
def test_a_long_prompt_is_hashed_in_pieces_that_do_not_show(length, block_size):
    """KV-1: pieces do not show even if none is a multiple of the block, or after a slice hashed ahead."""
    tokens = packed_tokens(random.Random(length).choices(range(100_000), k=length))
    whole = block_hashes(tokens, block_size=block_size)
    at_once, ahead = HashChain(ROOT, block_size), HashChain(ROOT, block_size)
    ahead.extend_by(tokens, 5_000)
    assert at_once.extend(tokens) == ahead.extend(tokens) == whole


@pytest.mark.parametrize("slice_tokens", [1, 3, 4, 7, 8, 100])
def test_a_chain_that_grows_by_slices_is_the_same(slice_tokens):
    """KV-1: blocks are whole, and a slice is one of them at least."""
    chain, left = HashChain(ROOT, BLOCK), []
    while chain.unhashed(len(TOKENS)):
        left.append(chain.unhashed(len(TOKENS)))
        chain.extend_by(TOKENS, slice_tokens)
    assert left[0] == len(TOKENS) // BLOCK * BLOCK
    assert all(0 < before - after <= max(slice_tokens, BLOCK) for before, after in pairwise(left))
    assert chain.extend(TOKENS) == block_hashes()


@pytest.mark.parametrize("common", [0, 3, 4, 6, 8, 11, 12])
def test_a_fork_has_the_digests_of_the_common_blocks_only(common: int):
    """KV-1: a sequence that diverges inside a block has its own digests from that block on."""
    chain, other = HashChain(ROOT, BLOCK), packed_tokens([*TOKENS[:common], *range(50, 70)])
    chain.extend(TOKENS)
    fork = chain.fork(common)
    assert len(fork._block_hashes) == common // BLOCK
    assert fork.extend(other) == block_hashes(other)
    assert chain.extend(TOKENS) == block_hashes(), "the original is as it was"
