"""MF-3: Megatron-LM's server is launched with its flags, at the sizes of one rank, and waited for with its words."""

from __future__ import annotations

import pytest
import torch

from arguments import parse_server_arguments
from megatron_ext.config import ModelConfig
from megatron_ext.mcore import platform
from megatron_ext.models.build import build_model
from megatron_ext.server.run import build_serving
from tests.on_request import long_except
from tests.unit_tests.models.megatron import megatron_lm
from tests.unit_tests.models.megatron.megatron_lm import perturbed
from tests.unit_tests.support.server import LiveServer
from tests.unit_tests.support.vocabularies import write_tiktoken

BATCHING = "--inference-dynamic-batching"
RUN_C = f"""
--bf16: true
--use-checkpoint-args: true
--inference-max-seq-length: 4096
--micro-batch-size: 1
--attention-backend: flash
--return-log-probs: true
--dist-ckpt-strictness: log_unexpected
--pipeline-model-parallel-size: 1
--tensor-model-parallel-size: 1
--expert-tensor-parallel-size: 1
--expert-model-parallel-size: 1
--sequence-parallel: true
--moe-router-dtype: fp32
--moe-token-dispatcher-type: alltoall
--transformer-impl: inference_optimized
--te-rng-tracker: true
--inference-rng-tracker: true
--cuda-graph-impl: local
--model-provider: hybrid
{BATCHING}-buffer-size-gb: 0.02
{BATCHING}-max-tokens: 2048
--enable-chunked-prefill: true
--inference-logging-step-interval: 50
{BATCHING}-num-cuda-graphs: -1
{BATCHING}-max-requests: 256
"""
PLAIN = (
    RUN_C
    + """
--load: {root}/model
--cuda-graph-scope: full_iteration_inference
"""
)
CACHING = (
    RUN_C
    + f"""
--pretrained-checkpoint: {{root}}/model
--tokenizer-model: {{root}}/nano.vocab.json
--inference-cuda-graph-all-prefills: true
--inference-cuda-graph-scope: block
{BATCHING}-prefix-caching: true
{BATCHING}-prefix-caching-eviction-policy: lru
{BATCHING}-prefix-caching-mamba-gb: 0.01
--port: 5000
"""
)
CONFIG = ModelConfig(
    hybrid_override_pattern="M-M*-",
    hidden_size=32,
    ffn_hidden_size=48,
    num_attention_heads=4,
    num_query_groups=2,
    mamba_state_dim=16,
    mamba_head_dim=16,
    mamba_num_groups=2,
    vocab_size=1280,
)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder with a checkpoint of Megatron-LM's and the vocabulary that it was trained with."""
    root = tmp_path_factory.mktemp("run_C")
    vocabulary = write_tiktoken(root / "nano.vocab.json")
    platform.initialize()
    model = perturbed(build_model(CONFIG, device=torch.device("cpu"), seed=3))
    trained = {"tokenizer_type": "TikTokenizer", "tokenizer_model": str(vocabulary), "tiktoken_pattern": "v1"}
    args = megatron_lm.arguments(CONFIG, **trained)
    tensors = megatron_lm.stored_tensors(model, CONFIG)
    megatron_lm.write(root / "model", tensors, args)
    return root


def settings_of(flags: str, root, tmp_path):
    flags = flags.format(root=root)
    words: list[str] = []
    for line in filter(None, flags.split("\n")):
        name, _, value = line.partition(": ")
        words += [name] if value == "true" else [name, value]
    return parse_server_arguments(words)


@pytest.mark.parametrize("flags", long_except([CACHING], [PLAIN, CACHING]), ids=["graphs", "caching"])
def test_the_server_starts_and_answers(flags, root, tmp_path, caplog):
    """Sampling flags have no effect and are said; the tokenizer is the one that the checkpoint was trained with."""
    settings = settings_of(flags, root, tmp_path)
    (line,) = settings.start_notes
    assert line.startswith("accepted, and without effect here: --micro-batch-size")
    for name in ("--return-log-probs", "--sequence-parallel", "cuda-graph-scope"):
        assert name in line
    assert (settings.batching.has_input_buffers, settings.batching.graph_sizes) == (True, 16)
    server = LiveServer(build_serving(settings))
    try:
        assert settings.server.port == (5000 if flags is CACHING else 8000)
        assert server.http.get("/health").json()["status"] == "ok"
        assert server.engine.context.max_sequence_length == 4096
        tokenizer = server.serving.engine.tokenizer
        assert tokenizer.detokenize([1000 + ord("a")]) == "a"
        prompt = "Once upon a time"
        answer = server.client().completions.create(model="model", prompt=prompt, max_tokens=4, temperature=0)
        assert answer.usage.prompt_tokens == len(tokenizer.tokenize(prompt)) < len(prompt)
        assert answer.usage.completion_tokens == 4
    finally:
        server.stop()
