"""MF-3: the launch scripts of `examples/megatron/` start on small checkpoints in Megatron-LM's form."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from torch.distributed.run import get_args_parser

from arguments import parse_server_arguments
from megatron_ext.commands.run import DONE, main
from megatron_ext.config import ModelConfig
from megatron_ext.mcore import platform
from megatron_ext.models.build import build_model
from megatron_ext.server.run import build_serving
from tests.unit_tests.models.megatron import megatron_lm
from tests.unit_tests.models.megatron.megatron_lm import perturbed
from tests.unit_tests.models.test_load import write_tokenizer
from tests.unit_tests.support.server import LiveServer
from tests.unit_tests.support.source import ROOT
from tests.unit_tests.support.vocabularies import write_gpt2, write_tiktoken

SCRIPTS = ROOT / "examples" / "megatron"
BATCHING = "--inference-dynamic-batching"
SMALL = (f"{BATCHING}-buffer-size-gb", "0.02", f"{BATCHING}-block-size", "16")
SMALL_STATES = (f"{BATCHING}-prefix-caching-mamba-gb", "0.01")
SIZES = {"hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 4, "num_query_groups": 2, "vocab_size": 1280}
GPT = ModelConfig(hybrid_override_pattern="*-*-", position_embedding_type="rope", max_position_embeddings=1024, **SIZES)
HYBRID = ModelConfig(
    hybrid_override_pattern="M-M*-", mamba_state_dim=16, mamba_head_dim=16, mamba_num_groups=2, **SIZES
)
PROMPT = "Time travel to 2008, and go to a bar or a club or one of the myriad disco-basements on the Lower East Side"


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hybrid")
    platform.initialize()
    model = perturbed(build_model(HYBRID, device=torch.device("cpu"), seed=3))
    megatron_lm.write(folder, megatron_lm.stored_tensors(model, HYBRID), megatron_lm.arguments(HYBRID))
    return folder


@pytest.fixture(scope="module")
def gpt(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("gpt")
    platform.initialize()
    tensors = {key: value.detach() for key, value in megatron_lm.gpt_model(GPT).named_parameters()}
    megatron_lm.write(folder, tensors, megatron_lm.gpt_arguments(GPT))
    return folder


@pytest.fixture
def launched(tmp_path):
    """A function: the tool's arguments in a script's call of torchrun, which a stand-in for Python records."""
    python = tmp_path / "python"
    python.write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)

    def record(script: str, tool: str, *arguments: str, **variables: object) -> list[str]:
        environment = os.environ | {"PYTHON": str(python)} | {name: str(value) for name, value in variables.items()}
        command = [str(SCRIPTS / f"{script}.sh"), *arguments]
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
        module, name, *words = done.stdout.splitlines()
        assert (module, name) == ("-m", "torch.distributed.run")
        launch = get_args_parser().parse_args(words)
        assert (launch.nproc_per_node, launch.training_script) == ("1", str(ROOT / "tools" / tool))
        return launch.training_script_args

    return record


def run_twice(arguments: list[str], path: Path) -> list[dict]:
    """Run the same prompt twice, one after the other, and return both requests' results."""
    order = ["--drain-between-batches", "--batch-boundaries", "0,1"]
    assert main([*arguments, "--prompts", PROMPT, PROMPT, *order, "--output-path", str(path)]) == DONE
    results = json.loads(path.read_text("utf-8"))
    return [results["0"], results["1"]]


def test_hybrid_checkpoint_with_tiktoken(launched, hybrid, tmp_path):
    variables = {"CHECKPOINT_DIR": hybrid, "TOKENIZER_MODEL": write_tiktoken(tmp_path / "vocab.json")}
    cold, warm = run_twice(launched("hybrid", "run_inference.py", *SMALL, *SMALL_STATES, **variables), tmp_path / "o")
    assert len(cold["generated_tokens"]) == 30
    assert warm["generated_tokens"] == cold["generated_tokens"]
    assert warm["skipped_prefill_token_count"] > 0


def test_gpt_checkpoint_with_byte_pairs(launched, gpt, tmp_path):
    vocabulary, merges = write_gpt2(tmp_path)
    variables = {"CHECKPOINT_DIR": gpt, "VOCAB_FILE": vocabulary, "MERGE_FILE": merges}
    cold, warm = run_twice(launched("gpt", "run_inference.py", *SMALL, **variables), tmp_path / "o")
    assert len(cold["generated_tokens"]) == 30
    assert warm["skipped_prefill_token_count"] > 0


def test_server_with_a_hugging_face_tokenizer(launched, hybrid, tmp_path):
    variables = {"CHECKPOINT_DIR": hybrid, "TOKENIZER_MODEL": write_tokenizer(tmp_path, 50)}
    settings = parse_server_arguments(launched("server", "run_server.py", *SMALL, *SMALL_STATES, **variables))
    assert settings.server.port == 5000
    server = LiveServer(build_serving(settings))
    try:
        prompt = " ".join(f"w{number % 50}" for number in range(40))
        answers = [
            server.client().completions.create(model=hybrid.name, prompt=prompt, max_tokens=4, temperature=0)
            for _ in range(2)
        ]
        assert [answer.usage.completion_tokens for answer in answers] == [4, 4]
        assert answers[1].usage.prompt_tokens_details.cached_tokens == 32
    finally:
        server.stop()


def test_scripts_are_executable_and_tested():
    assert {path.name for path in SCRIPTS.iterdir()} == {"hybrid.sh", "gpt.sh", "server.sh"}
    assert all(os.access(path, os.X_OK) for path in SCRIPTS.iterdir())
