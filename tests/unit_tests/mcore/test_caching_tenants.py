"""KV-8, KV-9, EX-1, EX-3: salts, requests that opt out, turns of a chat, parameters on cached blocks; caching off."""

from __future__ import annotations

from megatron_ext.prefix_cache import hash_chain
from megatron_ext.prefix_cache.block_index import BlockIndex
from tests.unit_tests.support.caching import BLOCK
from tests.unit_tests.support.driver import assert_equals_oracle, make_prompt

PROMPT = make_prompt(3 * BLOCK + 7)


def test_salts(get_caching_driver, oracle):
    """EX-3: equal prompts share within a tenant only; no salt and the empty one are two more tenants."""
    driver = get_caching_driver()
    salts = ["a", "b", None, "", "aa"]
    for request_id, salt in enumerate(salts):
        driver.add(request_id, PROMPT, cache_salt=salt, num_tokens_to_generate=4)
    driver.step()
    assert driver.scheduler.cache.use().blocks_cached == 3 * len(salts)
    for request_id, salt in enumerate(salts, start=5):
        driver.add(request_id, PROMPT, cache_salt=salt)
    driver.add(10, PROMPT, cache_salt="c")
    driver.run()
    assert driver.skipped(*range(11)) == [0] * 5 + [48] * 5 + [0]
    for request_id in range(11):
        assert_equals_oracle(driver, request_id, oracle)


def test_opting_out(get_caching_driver, oracle):
    """KV-9: the request neither reads nor writes the cache, in prefill and in decode, beside requests that do."""
    driver = get_caching_driver()
    driver.add(0, PROMPT, num_tokens_to_generate=30, enable_prefix_caching=False)
    driver.step()
    assert driver.scheduler.cache.use().blocks_cached == 0
    driver.add(1, PROMPT, num_tokens_to_generate=30)  # does not find the first one's
    driver.step()
    cached = driver.scheduler.cache.use().blocks_cached
    driver.add(2, PROMPT, enable_prefix_caching=False)  # does not find the second one's
    driver.step()
    assert driver.scheduler.cache.use().blocks_cached == cached == 3
    driver.add(3, PROMPT)
    while 0 not in driver.records:
        driver.step()
    driver.add(4, [*PROMPT, *driver.records[0].generated_tokens], enable_prefix_caching=False)
    driver.run()
    assert driver.skipped(*range(5)) == [0, 0, 0, 48, 0]
    assert driver.records[4].prefill_reasons == {"opted_out": 85}
    for request_id in range(5):
        assert_equals_oracle(driver, request_id, oracle)


def test_a_block_completed_in_decode_is_shared_at_once(get_caching_driver, oracle):
    """EX-1, KV-5: the block is shared as soon as its last token's KV is written, and not before."""
    driver = get_caching_driver()
    driver.add(0, make_prompt(30), num_tokens_to_generate=40)
    request = driver.engine.get_request(0)
    while request.computed_end < 31:
        driver.step()
    assert len(request.tokens) == 32  # the block is known, and its last token not computed
    driver.add(1, list(request.tokens))
    driver.step()
    driver.add(2, [*request.tokens[:32], 5])
    driver.run()
    assert driver.skipped(1, 2) == [16, 32]
    for request_id in range(3):
        assert_equals_oracle(driver, request_id, oracle)


class TestOff:
    """KV-8: caching off hashes, indexes and keeps nothing. The same run with the cache on does all three."""

    @staticmethod
    def run(driver, monkeypatch) -> list[str]:
        """Return the names of the hashing and indexing functions that were called."""
        calls: list[str] = []
        block_hashes, add = hash_chain._hashes_of_blocks, BlockIndex.add

        def hash_watched(*args: object) -> object:
            calls.append("hash")
            return block_hashes(*args)

        def add_watched(*args: object) -> None:
            calls.append("index")
            add(*args)

        with monkeypatch.context() as patch:
            patch.setattr(hash_chain, "_hashes_of_blocks", hash_watched)
            patch.setattr(BlockIndex, "add", add_watched)
            driver.add(0, PROMPT, num_tokens_to_generate=20, skip_prompt_log_probs=True)
            driver.run()
        return calls

    def test_on(self, get_caching_driver, monkeypatch):
        driver = get_caching_driver()
        calls = self.run(driver, monkeypatch)
        assert (calls.count("hash"), calls.count("index")) == (2, 2)  # the prompt at once, then what decoding completes
        assert (
            driver.scheduler.cache.use().blocks_cached
            == driver.scheduler.cache.pool.total - driver.scheduler.cache.pool.free_count
            == 4
        )

    def test_off(self, get_driver, monkeypatch, oracle):
        driver = get_driver("attention_only")
        assert self.run(driver, monkeypatch) == []
        assert driver.scheduler.cache.pool.free_count == driver.scheduler.cache.pool.total
        assert driver.scheduler.cache.use().blocks_cached == 0
        assert driver.engine.core.statistics().prefix_cache() is None
        driver.add(1, PROMPT, skip_prompt_log_probs=True, cache_salt="a")
        assert driver.engine.get_request(1).chain is None
        driver.run()
        assert driver.records[1].prefill_reasons == {"caching_off": 55}
        assert (driver.records[1].matched_block_count, driver.engine.core.counters.skipped_tokens) == (0, 0)
        for request_id in range(2):
            assert_equals_oracle(driver, request_id, oracle)
