"""The tool from end to end on a tiny random model: exit codes, and one line for every mistake."""

from __future__ import annotations

import json
import logging
import re

import pytest
import torch

from megatron_ext.commands.run import DONE, REQUEST_FAILED, main
from megatron_ext.console.start import PHASES
from tests.forked import fork
from tests.unit_tests.support.held_server import run_tool
from tests.unit_tests.support.holding import PATIENCE

TINY = """
--hybrid-override-pattern M-*- --hidden-size 32 --num-attention-heads 2 --mamba-head-dim 16 --mamba-state-dim 16
--mamba-num-groups 1 --tokenizer-type NullTokenizer --vocab-size 64 --inference-dynamic-batching-block-count 8
--inference-dynamic-batching-max-requests 4
""".split()


@pytest.fixture
def prompt_file(tmp_path):
    def write(*lines: str) -> str:
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join(line + "\n" for line in lines))
        return str(path)

    return write


@pytest.fixture
def error_line(capfd):
    """A function: runs the tool, which must fail with bad usage and one line on standard error."""

    def fail(*argv: str) -> str:
        assert main(argv) == 2
        captured = capfd.readouterr()
        assert captured.out == ""
        (line,) = captured.err.splitlines()
        assert line.startswith("megatron-ext run: error: ")
        return line

    return fail


def test_prompts_to_table_and_json(prompt_file, tmp_path, capfd):
    path = prompt_file('{"token_ids": [1, 2, 3]}', '{"token_ids": [4], "num_tokens_to_generate": 2}')
    output = tmp_path / "out.json"
    argv = [
        "--prompt-file",
        path,
        "--num-tokens-to-generate",
        "5",
        "--output-path",
        str(output),
        "--output-format",
        "full",
    ]
    assert main([*TINY, *argv, "--output-request-events", "--inference-repeat-n", "2"]) == DONE
    assert "4 requests: 14 tokens generated" in capfd.readouterr().out
    results = json.loads(output.read_text())
    assert [len(results[key]["generated_tokens"]) for key in "0123"] == [5, 2, 5, 2]
    assert results["0"]["generated_tokens"] == results["2"]["generated_tokens"]
    assert [event["type"] for event in results["0"]["events"]] == ["ADD_ENGINE", "ADD_CONTEXT", "FIRST_TOKEN", "FINISH"]
    assert results["lifetime_prefill_token_count"] == 2 * (3 + 1)
    assert results["geometry"]["blocks"] == 8
    assert len(results["throughput"]) == 2
    assert results["model"] == "random weights, M-*-"


def test_seed_seeds_weights_and_requests(prompt_file, tmp_path):
    path = prompt_file('{"token_ids": [1, 2, 3], "temperature": 1.0}')

    def tokens(seed: str) -> list[int]:
        output = tmp_path / "out.json"
        assert main([*TINY, "--prompt-file", path, "--seed", seed, "--output-path", str(output)]) == DONE
        return json.loads(output.read_text())["0"]["generated_tokens"]

    assert tokens("1") == tokens("1")
    assert tokens("1") != tokens("2")


def test_a_prompt_that_cannot_be_served_fails_alone(prompt_file, tmp_path, capfd):
    """KV-12: a prompt larger than the pool; the other one runs."""
    too_long = json.dumps({"token_ids": [1] * (9 * 64)})
    path = prompt_file(too_long, '{"token_ids": [1, 2]}')
    output = tmp_path / "out.json"
    assert main([*TINY, "--prompt-file", path, "--output-path", str(output)]) == REQUEST_FAILED
    assert "1 not completed" in capfd.readouterr().out
    results = json.loads(output.read_text())
    assert results["0"]["status"] == "FAILED"
    assert results["0"]["error"]
    assert results["0"]["ttft"] is None
    assert results["1"]["status"] == "COMPLETED"


def test_a_dry_run_loads_and_runs_nothing(monkeypatch, capfd):
    monkeypatch.setattr("megatron_ext.offline.run._Offline", None)
    assert main([*TINY, "--dry-run"]) == DONE
    shown = capfd.readouterr().out
    assert "8 blocks of 64 tokens" in shown
    assert re.search(r"weights +│ [\d,]+ bytes \(float32\)", shown)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("--model-config nowhere.yaml", "nowhere.yaml: No such file"),
        ("--prompt-file nowhere.jsonl", "nowhere.jsonl: No such file"),
        ("--load nowhere", "--load nowhere does not exist"),
        ("--hybrid-override-pattern MZ", "unknown letter 'Z'"),
        ("--prompts 1 --output-path nowhere/out.json", "the folder nowhere does not exist"),
        ("--prompts 1 --drain-between-batches --batch-boundaries 0,1", "with 1 prompts"),
        ("--prompts 1 --tokenizer-model nowhere --tokenizer-type HuggingFaceTokenizer", "nowhere does not exist"),
        ("--prompts Hello", "--prompts, prompt 1: 'Hello' is not a token id"),
        ("--prompts 1 --inference-dynamic-batching-block-size 20", "block size 20 is not a multiple of 16"),
        ("--prompts 1 --hidden-size 10000000", "a model of hidden size 10000000, 4 layers and 64 vocabulary"),
    ],
)
def test_bad_usage(error_line, argv, expected):
    assert expected in error_line(*TINY, *argv.split())


class TestRanks:
    """MR-1: sizes that do not fit are one line, from the first rank, before anything starts."""

    def test_alone(self, error_line):
        line = error_line(*TINY, "--prompts", "1", "--tensor-model-parallel-size", "2")
        assert "--tensor-model-parallel-size 2 needs 2 ranks, and this is a single process" in line
        assert "torchrun --nproc-per-node 2 " in line

    @pytest.mark.parametrize("rank", ["0", "1", "2"])
    def test_a_world_that_does_not_divide(self, rank, monkeypatch, capfd):
        monkeypatch.setenv("WORLD_SIZE", "3")
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setattr(logging.root.manager, "disable", logging.NOTSET)  # what such a rank changes is taken back
        assert main([*TINY, "--prompts", "1", "--pipeline-model-parallel-size", "2"]) == 2
        captured = capfd.readouterr()
        said = "megatron-ext run: error: started on 3 ranks, and --pipeline-model-parallel-size 2 needs 2 or a multiple"
        assert captured.out == ""
        assert captured.err.startswith(said) if rank == "0" else captured.err == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="says that there is no CUDA")
def test_nccl_without_cuda_is_gloo(caplog):
    """MR-1: the change to gloo is reported once, and the run goes on."""
    assert main([*TINY, "--prompts", "1", "--distributed-backend", "nccl"]) == DONE
    assert caplog.text.count("nccl needs CUDA") == 1


def test_flag_over_yaml_over_checkpoint_over_default(prompt_file, tmp_path):
    """The winning source sets the maximum sequence length, shown by whether a request of 60 tokens is served."""
    path = prompt_file(json.dumps({"token_ids": [1] * 50, "num_tokens_to_generate": 10}))
    saved, yaml = str(tmp_path / "saved"), tmp_path / "flags.yaml"

    def run(*argv: str) -> int:
        return main([*argv, "--prompt-file", path, "--tokenizer-type", "NullTokenizer"])

    assert run(*TINY, "--max-position-embeddings", "40", "--save", saved) == REQUEST_FAILED
    assert run("--load", saved) == REQUEST_FAILED  # not the default of 4096
    yaml.write_text("max-position-embeddings: 60")
    assert run("--load", saved, "--model-config", str(yaml)) == DONE
    assert run("--load", saved, "--model-config", str(yaml), "--max-position-embeddings", "59") == REQUEST_FAILED


def test_a_process_of_its_own_reads_standard_input(tmp_path):
    """The script as a user starts it: exit code; on standard error the phases of the start, and one line."""
    attention_only = ["--hybrid-override-pattern", "*-"]  # about which there is nothing to warn
    said, log, given = (tmp_path / name for name in ("said", "log", "given"))
    given.write_text('{"token_ids": [1]}\n')
    process = fork(run_tool, "run_inference.py", [*TINY, *attention_only, "--prompt-file", "-"], said, log, given)
    process.join(PATIENCE)
    assert process.exitcode == DONE, log.read_text()
    lines = log.read_text().splitlines()
    others = [line for line in lines if not line.startswith("start: ")]
    assert len(others) == 1, others
    (warning,) = others
    assert warning.endswith("its weights are random")
    phases = [re.sub(r"[\d.]+ s$", "1 s", line) for line in lines if line != warning]
    assert phases == [*(f"start: {name} in 1 s" for name in PHASES), "start: ready after 1 s"]
    assert "1 request: 30 tokens generated" in said.read_text()


ROPE = """
--hybrid-override-pattern *-*- --hidden-size 32 --num-attention-heads 2 --position-embedding-type rope --vocab-size 64
--tokenizer-type NullTokenizer --inference-dynamic-batching-block-count 16 --return-log-probs
""".split()


def test_a_sequence_may_be_longer_than_the_positions_of_a_model_that_rotates(prompt_file, tmp_path):
    """MF-1: where the user insists, rotary embeddings have no last position, and nothing is cut off."""
    path = prompt_file(json.dumps({"token_ids": [1, 7, 5] * 50}))

    def log_probs(*argv: str) -> list[float]:
        output = tmp_path / "out.json"
        assert main([*ROPE, "--prompt-file", path, "--output-path", str(output), *argv]) == DONE
        return json.loads(output.read_text())["0"]["logprobs"]

    longer = log_probs(
        *("--max-position-embeddings", "64", "--inference-max-seq-length", "256", "--allow-long-max-model-len")
    )
    assert longer == pytest.approx(log_probs("--max-position-embeddings", "256"), rel=1e-4, abs=1e-4)
    assert len(longer) == 149 + 30


@pytest.mark.parametrize(
    ("kind", "named", "remedy"),
    [("learned_absolute", "learned", ""), ("rope", "rotary", ", or insist with --allow-long-max-model-len")],
)
def test_a_length_above_the_positions_is_refused(error_line, kind, named, remedy):
    argv = ["--prompts", "1", "--position-embedding-type", kind, "--max-position-embeddings", "64"]
    line = error_line(*TINY, *argv, "--inference-max-seq-length", "256")
    excess = f"--inference-max-seq-length 256 is more than the model's 64 {named} positions"
    assert f"{excess}; give at most 64{remedy}" in line


def test_the_start_has_ended_before_anything_is_printed(prompt_file, monkeypatch, caplog):
    """On a terminal the table would begin beside the progress bar of the start."""
    caplog.set_level(logging.INFO, "megatron_ext")
    said: list[str] = []
    table = "megatron_ext.offline.run.print_engine"
    monkeypatch.setattr(table, lambda *arguments: said.append(caplog.messages[-1]))
    path = prompt_file(json.dumps({"token_ids": [1]}))
    assert main([*TINY, "--prompt-file", path, "--num-tokens-to-generate", "1"]) == DONE
    assert [line.split(" after ")[0] for line in said] == ["start: ready"]
