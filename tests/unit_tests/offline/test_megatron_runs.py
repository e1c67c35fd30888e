"""MF-3: real launch lines of Megatron-LM start as they are, but for paths and sizes.

The flags are those of Megatron's functional tests; the checkpoint is small, and decides over the sizes that they say.
"""

from __future__ import annotations

import json
import logging

import pytest
import torch

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
--load model --bf16 --use-checkpoint-args --inference-max-seq-length 4096 --micro-batch-size 1
--attention-backend flash --return-log-probs --dist-ckpt-strictness log_unexpected --pipeline-model-parallel-size 1
--tokenizer-type TikTokenizer --tiktoken-pattern v2 --tokenizer-model multiMixV8.vocab.json
--no-use-tokenizer-model-from-checkpoint-args --use-mcore-models --max-tokens-to-oom 3600000 --no-load-optim
--timing-log-level 0 --log-interval 1 --log-num-zeros-in-grad --log-memory-to-tensorboard --log-timers-to-tensorboard
--log-validation-ppl-to-tensorboard --distributed-backend nccl --transformer-impl transformer_engine
--tensor-model-parallel-size 1 --deterministic-mode --ckpt-format torch_dist --num-attention-heads 16
--temperature 1.0 --top_k 1 --num-tokens-to-generate 30 {BATCHING}-prefix-caching --output-path OUTPUT
--prompts PROMPT
"""
RUN_A = f"""
--auto-detect-ckpt-format --inference-ckpt-non-strict --num-layers 24 --hidden-size 1152
--max-position-embeddings 1024 --seq-length 1024 {BATCHING}-buffer-size-gb 0.02 --incoming-requests-per-sec -1
--inference-repeat-n 8 --inference-logging-step-interval 1
"""
RUN_B = f"""
--expert-model-parallel-size 1 --model-provider hybrid --init-method-std 0.0198 --init-method-std 0.014
--untie-embeddings-and-output-weights --disable-bias-linear --hidden-size 2048 --position-embedding-type none
--ffn-hidden-size 11264 --kv-channels 128 --hybrid-layer-pattern M-M-M-M*-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-
--spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec --normalization RMSNorm --swiglu
--attention-dropout 0.0 --hidden-dropout 0.0 --seq-length 4096 --max-position-embeddings 4096
--ckpt-fully-parallel-save --ckpt-fully-parallel-load --ckpt-assume-constant-structure --num-workers 8
--save-interval 2000 --no-create-attention-mask-in-dataloader --incoming-requests-per-step 32 --inference-repeat-n 3
--no-record-throughput {BATCHING}-max-requests 16 {BATCHING}-prefix-caching-mamba-gb 0.01
--mamba-inference-conv-states-dtype fp32 --mamba-inference-ssm-states-dtype fp32
"""
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


@pytest.mark.parametrize("name", long_except(["B"], RUNS))
def test_a_launch_line(name, checkpoints, tmp_path, caplog):
    """What has no effect is said, and what the checkpoint decides."""
    root, output = checkpoints[name], tmp_path / "o"
    vocabulary = "multiMixV8.vocab.json"
    places = {"model": str(root / "model"), vocabulary: str(root / vocabulary), "OUTPUT": str(output), "PROMPT": PROMPT}
    argv = [places.get(word, word) for word in (ALL + RUNS[name][1]).split()]
    with caplog.at_level(logging.INFO, logger="megatron_ext"):
        assert main(argv) == DONE
    (said,) = (line for line in caplog.messages if line.startswith("accepted, and without effect here: "))
    assert "--micro-batch-size" in said
    assert "--use-mcore-models" in said
    decided, *lengths = (line for line in caplog.messages if line.startswith("--use-checkpoint-args: "))
    assert [line.split(" decide over ")[1] for line in lengths] == ["--inference-max-seq-length 4096"] * (name == "A")
    assert f"--hidden-size {1152 if name == 'A' else 2048} (not 32)" in decided
    assert "--num-attention-heads 16 (not 4)" in decided
    assert any("nccl needs CUDA" in line for line in caplog.messages) != torch.cuda.is_available()
    results = json.loads(output.read_text("utf-8"))
    assert len(results.get("throughput", ())) == (8 if name == "A" else 0), "passes"
    assert [key for key in results if key.isdigit()] == ["0"]
    assert results["0"]["status"] == "COMPLETED"
    assert len(results["0"]["generated_tokens"]) == 30
    assert results["0"]["input_prompt"] == PROMPT
