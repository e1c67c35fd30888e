"""MF-3: real launch lines of Megatron-LM start as they are, but for paths and sizes, and as the YAML files they were.

The flags are those of Megatron's functional tests; the checkpoint is small, and decides over the sizes that they say.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os

import pytest
import torch

from arguments import parse_arguments
from megatron_ext.commands.run import DONE, main
from megatron_ext.config import ModelConfig
from megatron_ext.models.build import build_model
from tests.on_request import long_except
from tests.unit_tests.models.megatron import megatron_lm
from tests.unit_tests.models.megatron.megatron_lm import perturbed
from tests.unit_tests.support.vocabularies import write_tiktoken

BATCHING = "--inference-dynamic-batching"
PROMPT = "Time travel to 2008, and go to a bar or a club or one of the myriad disco-basements on the Lower East Side"
ALL = f"""
--load: ${{CHECKPOINT_LOAD_PATH}}/model
--bf16: true
--use-checkpoint-args: true
--inference-max-seq-length: 4096
--micro-batch-size: 1
--attention-backend: flash
--return-log-probs: true
--dist-ckpt-strictness: log_unexpected
--pipeline-model-parallel-size: 1
--tokenizer-type: TikTokenizer
--tiktoken-pattern: v2
--tokenizer-model: ${{CHECKPOINT_LOAD_PATH}}/multiMixV8.vocab.json
--no-use-tokenizer-model-from-checkpoint-args: true
--use-mcore-models: true
--max-tokens-to-oom: 3600000
--no-load-optim: true
--timing-log-level: 0
--log-interval: 1
--log-num-zeros-in-grad: true
--log-memory-to-tensorboard: true
--log-timers-to-tensorboard: true
--log-validation-ppl-to-tensorboard: true
--distributed-backend: nccl
--transformer-impl: transformer_engine
--tensor-model-parallel-size: 1
--deterministic-mode: true
--ckpt-format: torch_dist
--num-attention-heads: 16
--temperature: 1.0
--top_k: 1
--num-tokens-to-generate: 30
{BATCHING}-prefix-caching: true
--output-path: ${{INFERENCE_OUTPUT_PATH}}
--prompts: {PROMPT}
"""
RUN_A = f"""
--auto-detect-ckpt-format: true
--inference-ckpt-non-strict: true
--num-layers: 24
--hidden-size: 1152
--max-position-embeddings: 1024
--seq-length: 1024
{BATCHING}-buffer-size-gb: 0.02
--incoming-requests-per-sec: -1
--inference-repeat-n: 8
--inference-logging-step-interval: 1
"""
RUN_B = f"""
--expert-model-parallel-size: 1
--model-provider: hybrid
--init-method-std: 0.0198
--init-method-std: 0.014
--untie-embeddings-and-output-weights: true
--disable-bias-linear: true
--hidden-size: 2048
--position-embedding-type: none
--ffn-hidden-size: 11264
--kv-channels: 128
--hybrid-layer-pattern: M-M-M-M*-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-
--spec: megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec
--normalization: RMSNorm
--swiglu: true
--attention-dropout: 0.0
--hidden-dropout: 0.0
--seq-length: 4096
--max-position-embeddings: 4096
--ckpt-fully-parallel-save: true
--ckpt-fully-parallel-load: true
--ckpt-assume-constant-structure: true
--num-workers: 8
--save-interval: 2000
--no-create-attention-mask-in-dataloader: true
--incoming-requests-per-step: 32
--inference-repeat-n: 3
--no-record-throughput: true
{BATCHING}-max-requests: 16
{BATCHING}-prefix-caching-mamba-gb: 0.01
--mamba-inference-conv-states-dtype: fp32
--mamba-inference-ssm-states-dtype: fp32
"""
HEAD = """\
ENV_VARS:
  CUDA_DEVICE_MAX_CONNECTIONS: 1
  NCCL_ALGO: Ring
  CUBLAS_WORKSPACE_CONFIG: :4096:8
TEST_TYPE: frozen-start
MODE: inference
MODEL_ARGS:
"""
METRICS = 'METRICS:\n  - "generated_tokens"\n  - "logprobs"\n'
SIZES = {"hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 4, "num_query_groups": 2, "vocab_size": 1280}
GPT = ModelConfig(hybrid_override_pattern="*-*-", position_embedding_type="rope", max_position_embeddings=1024, **SIZES)
HYBRID = ModelConfig(
    hybrid_override_pattern="M-M*-",
    mamba_state_dim=16,
    mamba_head_dim=16,
    mamba_num_groups=2,
    swiglu=True,
    untie_embeddings_and_output_weights=True,
    **SIZES,
)
RUNS = {"A": (GPT, RUN_A), "B": (HYBRID, RUN_B)}


def yaml_of(flags: str) -> str:
    return HEAD + "".join(f"  {line}\n" for line in flags.split("\n") if line) + METRICS


def words_of(flags: str, variables: dict[str, str]) -> list[str]:
    """Split the flags into words, as on a command line."""
    words: list[str] = []
    for line in flags.split("\n"):
        name, _, value = line.partition(": ")
        for variable, text in variables.items():
            value = value.replace(f"${{{variable}}}", text)
        words += [] if not line else [name] if value == "true" else [name, value]
    return words


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Folders, by run, with Megatron-LM's checkpoint and the vocabulary beside it."""
    made = {}
    for name, (config, _) in RUNS.items():
        root = tmp_path_factory.mktemp(f"run_{name}")
        write_tiktoken(root / "multiMixV8.vocab.json")
        if config is GPT:
            model = megatron_lm.gpt_model(config)
            tensors, args = dict(model.named_parameters()), megatron_lm.gpt_arguments(config)
            tensors = {key: value.detach() for key, value in tensors.items()}
        else:
            model = perturbed(build_model(config, device=torch.device("cpu"), seed=3))
            tensors, args = megatron_lm.stored_tensors(model, config), megatron_lm.arguments(config)
        megatron_lm.write(root / "model", tensors, args)
        made[name] = root
    return made


@pytest.fixture(params=long_except(["B"], RUNS))
def run(request, checkpoints, tmp_path, monkeypatch):
    """Name and flags of a run, and the variables in them; what a file exports is taken back."""
    for name in ("CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_ALGO", "CUBLAS_WORKSPACE_CONFIG"):
        monkeypatch.setenv(name, "unset")
    variables = {"CHECKPOINT_LOAD_PATH": str(checkpoints[request.param]), "INFERENCE_OUTPUT_PATH": str(tmp_path / "o")}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return request.param, ALL.strip() + RUNS[request.param][1], variables


def test_as_a_command_line_and_as_yaml(run, tmp_path, caplog):
    """Tokens and log-probs are the same, each time; what has no effect is said, and what the checkpoint decides."""
    name, flags, variables = run
    path = tmp_path / "model_config.yaml"
    path.write_text(yaml_of(flags))
    results = []
    for argv in (words_of(flags, variables), ["--model-config", str(path)]):
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="megatron_ext"):
            assert main(argv) == DONE
        said = [line for line in caplog.messages if line.startswith("accepted, and without effect here: ")]
        assert len(said) == 1
        assert "--micro-batch-size" in said[0]
        assert "--use-mcore-models" in said[0]
        decided, *lengths = (line for line in caplog.messages if line.startswith("--use-checkpoint-args: "))
        assert [line.split(" decide over ")[1] for line in lengths] == ["--inference-max-seq-length 4096"] * (
            name == "A"
        )
        assert f"--hidden-size {1152 if name == 'A' else 2048} (not 32)" in decided
        assert "--num-attention-heads 16 (not 4)" in decided
        assert any("nccl needs CUDA" in line for line in caplog.messages) != torch.cuda.is_available()
        results.append(json.loads((tmp_path / "o").read_text("utf-8")))
    one, other = results
    assert ("throughput" in one) == (name == "A")
    if name == "A":
        assert len(one["throughput"]) == 8, "passes"
    assert [key for key in one if key.isdigit()] == ["0"]
    request = one["0"]
    assert request["status"] == "COMPLETED"
    assert len(request["generated_tokens"]) == 30
    assert request["generated_tokens"] == other["0"]["generated_tokens"]
    assert request["input_prompt"] == PROMPT
    assert request["logprobs"] == other["0"]["logprobs"]


def test_the_file_says_what_the_line_says(run, tmp_path):
    """Reading it sets no variable; starting does."""
    path = tmp_path / "model_config.yaml"
    path.write_text(yaml_of(run[1]))
    settings = parse_arguments(["--model-config", str(path)])
    assert dict(settings.start.environment)["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    line = parse_arguments(words_of(run[1], run[2]))
    assert settings == dataclasses.replace(
        line,
        start=settings.start,
        source=settings.source,
        run=dataclasses.replace(line.run, ignore_unknown_prompt_fields=True),
    )
    assert os.environ["NCCL_ALGO"] == "unset"
