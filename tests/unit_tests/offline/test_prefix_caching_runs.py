"""Prefix caching as a user of the command `run` meets it: flags, prompt lines, JSON, log."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megatron_ext.commands.run import DONE, main
from megatron_ext.scheduling.explanation import Reason

ATTENTION_ONLY = """
--hybrid-override-pattern *-*- --hidden-size 32 --num-attention-heads 2 --position-embedding-type rope
--untie-embeddings-and-output-weights --tokenizer-type NullTokenizer --vocab-size 64 --num-tokens-to-generate 4
--inference-dynamic-batching-block-count 16 --inference-dynamic-batching-block-size 4
--inference-dynamic-batching-max-requests 4
""".split()
HYBRID = """
--hybrid-override-pattern M-*- --mamba-head-dim 16 --mamba-state-dim 16 --mamba-num-groups 1
--inference-dynamic-batching-block-size 16
""".split()
ON, OFF = "--inference-dynamic-batching-enable-prefix-caching", "--no-inference-dynamic-batching-enable-prefix-caching"
POLICY = "--inference-dynamic-batching-prefix-caching-eviction-policy"
GB, SLOTS, MODE = (f"--inference-dynamic-batching-prefix-caching-mamba-{end}" for end in ("gb", "slots", "mode"))
LOG = ("--inference-logging-step-interval", "1")
PROMPT = [5, 9, 13, 2, 40, 41, 42, 7, 8, 60]  # two blocks and two tokens


@pytest.fixture
def prompt_file(tmp_path):
    def write(*lines: dict) -> str:
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return str(path)

    return write


@pytest.fixture
def run(prompt_file, tmp_path):
    """A function: runs lines one after the other, and gives the JSON."""

    def run_lines(*lines: dict, flags: tuple[str, ...] = ()) -> dict:
        output = tmp_path / "out.json"
        batches = ["--drain-between-batches", "--batch-boundaries", ",".join(str(i) for i in range(len(lines)))]
        files = ["--prompt-file", prompt_file(*lines), "--output-path", str(output), "--output-format", "full"]
        assert main([*ATTENTION_ONLY, *flags, *files, *batches]) == DONE
        return json.loads(output.read_text())

    return run_lines


def skipped(results: dict) -> list[int]:
    return [entry["skipped_prefill_token_count"] for key, entry in results.items() if key.isdigit()]


class TestFlags:
    """KV-8: caching is on by default, off by either spelling, and each policy keeps its blocks."""

    @pytest.mark.parametrize(
        "flags", [(), (ON,), (OFF, ON), (OFF, "--inference-dynamic-batching-prefix-caching")], ids=str
    )
    def test_on(self, run, flags):
        results = run({"token_ids": PROMPT}, {"token_ids": PROMPT}, flags=flags)
        assert skipped(results) == [0, 8]
        assert results["lifetime_skipped_token_count"] == 8
        assert results["lifetime_prefill_token_count"] == 12

    @pytest.mark.parametrize("flags", [(OFF,), ("--no-inference-dynamic-batching-prefix-caching",), (ON, OFF)], ids=str)
    def test_off(self, run, flags):
        results = run({"token_ids": PROMPT}, {"token_ids": PROMPT}, flags=flags)
        assert skipped(results) == [0, 0]
        assert results["prefix_cache"] is None
        assert results["geometry"]["shortest_prompt_that_can_hit"] is None
        assert results["1"]["prefill_reasons"] == {"caching_off": 10}

    @pytest.mark.parametrize(("policy", "expected"), [("lru", [0, 8]), ("ref_zero", [0, 0])])
    def test_policies(self, run, policy, expected):
        """KV-4: no request uses the blocks any more when the second prompt arrives."""
        results = run({"token_ids": PROMPT}, {"token_ids": PROMPT}, flags=(POLICY, policy))
        assert skipped(results) == expected
        assert (results["prefix_cache"]["blocks_cached"] > 0) == (policy == "lru")


class TestFields:
    """KV-9, EX-3: fields of a prompt line about the cache."""

    def test_opting_out_reads_and_writes_nothing(self, run):
        out = {"token_ids": PROMPT, "enable_prefix_caching": False}
        results = run(out, {"token_ids": PROMPT}, out, {"token_ids": PROMPT})
        assert skipped(results) == [0, 0, 0, 8]
        assert results["2"]["prefill_reasons"] == {"opted_out": 10}
        assert results["2"]["matched_block_count"] == 0

    def test_salts_keep_tenants_apart(self, run):
        salts = [{"cache_salt": salt} for salt in ("a", "b", "a", "")]
        results = run(*({"token_ids": PROMPT} | salt for salt in salts), {"token_ids": PROMPT})
        assert skipped(results) == [0, 0, 8, 0, 0]


class TestStatistics:
    """KV-11: the `prefix_cache` object."""

    KEYS = """
    blocks_total blocks_cached blocks_evictable blocks_in_use slots_total slots_used hits blocks_evicted slots_evicted
    snapshots_taken snapshots_skipped snapshots_replaced coordination_waits
    provisional_slots provisional_taken provisional_consumed provisional_given_up
    """.split()

    def test_keys_are_frozen(self, run):
        """A change here breaks scripts: it belongs into CHANGELOG.md."""
        assert sorted(run({"token_ids": [1]})["prefix_cache"]) == sorted(self.KEYS)

    def test_the_documents_have_them_all(self):
        """The documents list every reason of EX-2 too."""
        root = Path(__file__).parents[3]
        text = "".join(
            (root / "docs" / name).read_text(encoding="utf-8") for name in ("prefix_caching.md", "policies.md")
        )
        for name in (*self.KEYS, *(reason.value for reason in Reason)):
            assert f"`{name}`" in text


RANDOM = "describe a model other than the embedded one: its weights are random"


def messages_of_run(caplog) -> list[str]:
    """Messages without those of every start with random weights."""
    return [one for one in caplog.messages if not one.endswith(RANDOM) and not one.startswith("start: ")]


class TestWarning:
    """HY-1: a setting without effect is reported once; effective ones are not."""

    NO_SLOT = "there is no slot for snapshots of recurrent states: KV blocks are shared, and no prompt token is skipped"
    UNUSED = "this model has no recurrent layers: settings of snapshots have no effect"

    def messages(self, caplog, *flags: str) -> list[str]:
        assert main([*ATTENTION_ONLY, *flags, "--prompts", "1 2 3"]) == DONE
        return messages_of_run(caplog)

    @pytest.mark.parametrize("flags", [(*HYBRID, GB, "0"), (*HYBRID, SLOTS, "0", "--inference-repeat-n", "2")], ids=str)
    def test_no_slots(self, caplog, flags):
        (message,) = self.messages(caplog, *flags)
        assert message.startswith(self.NO_SLOT)

    @pytest.mark.parametrize("flags", [(SLOTS, "3"), (MODE, "align")], ids=str)
    def test_no_recurrent_layers(self, caplog, flags):
        assert self.messages(caplog, *flags) == [self.UNUSED]


class TestLog:
    """FX-6: the periodic line."""

    def test_computed_and_skipped_tokens_and_blocks(self, prompt_file, caplog):
        path = prompt_file({"token_ids": PROMPT}, {"token_ids": PROMPT})
        batches = ["--drain-between-batches", "--batch-boundaries", "0,1"]
        assert main([*ATTENTION_ONLY, "--prompt-file", path, *batches, *LOG]) == DONE
        lines = messages_of_run(caplog)
        assert len(lines) == 8  # 4 tokens each
        assert "prefill (cumul): computed 10, skipped 0 (0.0% skipped)" in lines[0]
        assert "prefill (cumul): computed 12, skipped 8 (40.0% skipped)" in lines[-1]
        assert re.search(r"prefix cache util: KV \d+/16 blocks cached \(\d+ evictable\)$", lines[-1])

    def test_no_cache_statistics_with_caching_off(self, prompt_file, caplog):
        path = prompt_file({"token_ids": PROMPT})
        assert main([*ATTENTION_ONLY, OFF, "--prompt-file", path, *LOG]) == DONE
        line = messages_of_run(caplog)[-1]
        assert line.endswith("KV blocks: 0 of 16 in use")
        assert "prefix cache" not in line
