"""Models that benchmarks run, with random weights, and engines around them.

Models of transformers are saved by it and loaded by this package, so that both have equal weights.
`python -m benchmarks.models DIR 250m [quick]` writes a model of `benchmarks.peers.sizes` for peers.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import (
    JambaConfig,
    JambaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    PreTrainedModel,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from benchmarks.cases import VOCABULARY, token_ids
from benchmarks.peers.sizes import SIZES, Shape
from megatron_ext.config import BatchingConfig, CacheConfig, ModelConfig, RequestParams, SourceConfig
from megatron_ext.config.speculation import NO_SPECULATION, SpeculationConfig
from megatron_ext.engine.core import EngineCore
from megatron_ext.engine.result import StepOutput
from megatron_ext.mcore import platform
from megatron_ext.mcore.adapter import InferenceEngine
from megatron_ext.mcore.assemble import build_engine
from megatron_ext.models.build import build_model
from megatron_ext.models.load import LoadedModel, load_model
from megatron_ext.scheduling.record import RequestRecord
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.request_inputs import RequestInputs
from megatron_ext.text.tokenizer import NullTokenizer

SMALL = SIZES["5m"].shape
OFF = CacheConfig(enable_prefix_caching=False)
# All models of transformers have eight layers.
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2}
COMMON = {"eos_token_id": None, "pad_token_id": 0}
SIZES_OF_OTHERS = {"vocab_size": VOCABULARY, "hidden_size": 256}
LONG = {"max_position_embeddings": 16_384}


def nemotron_h(shape: Shape = SMALL) -> PreTrainedModel:
    """Build NemotronH: Mamba-2, attention and MLP layers."""
    config = NemotronHConfig(
        **COMMON | LONG,
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        intermediate_size=shape.mlp,
        num_hidden_layers=len(shape.pattern),
        hybrid_override_pattern=shape.pattern,
        head_dim=shape.head_dim,
        mamba_num_heads=shape.mamba_heads,
        mamba_head_dim=shape.mamba_head_dim,
        ssm_state_size=shape.state,
        n_groups=shape.groups,
        chunk_size=shape.chunk,
        tie_word_embeddings=False,
    )
    return without_time_step_limit(NemotronHForCausalLM(config))


def without_time_step_limit(model: PreTrainedModel) -> PreTrainedModel:
    """Lift the limit of step sizes, which transformers' chunked path alone applies."""
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = (0.0, float("inf"))
    return model


def mamba() -> PreTrainedModel:
    """Build Mamba: Mamba-1 layers only."""
    return MambaForCausalLM(
        MambaConfig(**COMMON | SIZES_OF_OTHERS, state_size=16, num_hidden_layers=8, tie_word_embeddings=False)
    )


def jamba() -> PreTrainedModel:
    """Build Jamba: two attention layers among eight, the others Mamba-1, an MLP after each."""
    config = JambaConfig(
        **COMMON | SIZES_OF_OTHERS,
        **HEADS,
        **LONG,
        intermediate_size=512,
        num_hidden_layers=8,
        attn_layer_period=4,
        attn_layer_offset=3,
        num_experts=1,
        mamba_d_state=16,
        mamba_d_conv=4,
        mamba_expand=2,
        mamba_dt_rank=16,
    )
    return JambaForCausalLM(config)


def qwen3_next() -> PreTrainedModel:
    """Build Qwen3-Next: two attention layers among eight, the others gated delta nets, an MLP after each."""
    config = Qwen3NextConfig(
        **COMMON | SIZES_OF_OTHERS,
        **HEADS,
        **LONG,
        intermediate_size=512,
        num_hidden_layers=8,
        head_dim=32,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        linear_num_key_heads=8,
        linear_num_value_heads=16,
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 2,
        mlp_only_layers=list(range(8)),
    )
    return Qwen3NextForCausalLM(config)


def llama() -> PreTrainedModel:
    """Build Llama: eight layers of attention."""
    config = LlamaConfig(
        **COMMON | SIZES_OF_OTHERS,
        **HEADS,
        intermediate_size=1024,
        num_hidden_layers=8,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config)


# Shapes of models that are built without transformers.
TINY = ModelConfig(
    hybrid_override_pattern="M*",
    hidden_size=32,
    num_attention_heads=2,
    mamba_state_dim=8,
    mamba_head_dim=8,
    mamba_num_groups=2,
    vocab_size=96,
)


def shaped(shape: Shape) -> ModelConfig:
    """Return the configuration of a model of this shape."""
    return ModelConfig(
        hybrid_override_pattern=shape.pattern,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.mlp,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        mamba_num_heads=shape.mamba_heads,
        mamba_head_dim=shape.mamba_head_dim,
        mamba_state_dim=shape.state,
        mamba_num_groups=shape.groups,
        squared_relu=True,
        vocab_size=shape.vocabulary,
        max_position_embeddings=16_384,
    )


NEMOTRON_SHAPED = shaped(SMALL)


def random_model(config: ModelConfig, **options: object) -> LoadedModel:
    """Build a model of this shape with random weights; see `build_model` for the options."""
    model = build_model(config, **{"device": platform.device(), **options})
    return loaded_model(model, config)


def loaded_model(model: torch.nn.Module, config: ModelConfig) -> LoadedModel:
    """Return a model together with its configuration and a tokenizer of numbers."""
    assert config.vocab_size is not None, "every shape here has one"
    dtype = next(model.parameters()).dtype
    return LoadedModel(model, config, NullTokenizer(config.vocab_size), dtype, "random weights")


@dataclass(frozen=True)
class Pair:
    """Model of transformers, and the same one loaded by this package."""

    reference: PreTrainedModel
    ours: LoadedModel


def pair(build: Callable[[], PreTrainedModel] = nemotron_h) -> Pair:
    """Build a model of a fixed seed, and load it."""
    torch.manual_seed(0)
    return pair_of(build())


def pair_of(reference: PreTrainedModel) -> Pair:
    """Load a model of transformers."""
    device = platform.device()
    with tempfile.TemporaryDirectory() as directory:
        reference.save_pretrained(directory)
        ours = load_model(SourceConfig(load_hf=directory), {}, device=device)
    return Pair(reference.eval().to(device), ours)


class Engine:
    """Engine core whose requests are token ids and whose steps the caller takes.

    Args:
        core: Engine core without requests.
    """

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self._ids = itertools.count()

    def add(self, prompt: Sequence[int], params: RequestParams) -> Request:
        """Queue a request."""
        return self.core.add(next(self._ids), RequestInputs(tuple(prompt), params))

    def step(self) -> StepOutput:
        """Take one step."""
        return self.core.step()

    def drain(self) -> list[RequestRecord]:
        """Step until no request is left; return the records in the order in which they ended."""
        records: list[RequestRecord] = []
        while self.core.is_busy:
            records += self.step().records
        return records

    def generate(self, prompts: Sequence[Sequence[int]], params: RequestParams) -> list[RequestRecord]:
        """Serve prompts to their end; return the records in the order of the prompts."""
        for prompt in prompts:
            self.add(prompt, params)
        return sorted(self.drain(), key=lambda record: record.request_id)

    def start_decoding(self, prompts: Sequence[Sequence[int]], params: RequestParams) -> list[Request]:
        """Queue prompts, and step until all of their requests decode."""
        requests = [self.add(prompt, params) for prompt in prompts]
        while not all(request.is_decoding for request in requests):
            self.step()
        return requests


def engine(
    loaded: LoadedModel, cache: CacheConfig = OFF, speculation: SpeculationConfig = NO_SPECULATION, **batching: object
) -> Engine:
    """Build an engine core around a model, by default without a cache; see `inference_engine`."""
    return Engine(inference_engine(loaded, cache, speculation, **batching).core)


def inference_engine(
    loaded: LoadedModel, cache: CacheConfig = OFF, speculation: SpeculationConfig = NO_SPECULATION, **batching: object
) -> InferenceEngine:
    """Build an engine around a model, by default without a cache.

    Args:
        loaded: The model.
        cache: Prefix caching.
        speculation: Drafts.
        batching: Fields of `BatchingConfig`.
    """
    settings = BatchingConfig(**batching)
    return build_engine(
        loaded.model,
        loaded.config,
        loaded.tokenizer,
        settings,
        cache,
        dtype=loaded.dtype,
        speculation=speculation,
        packs_weights=True,
    )


def prompts(count: int, length: int, name: str = "prompt", vocabulary: int = VOCABULARY) -> list[list[int]]:
    """Return prompts with nothing in common."""
    return [token_ids(length, f"{name} {length} {i}", vocabulary) for i in range(count)]


def write(directory: str, size: str, quick: str = "") -> None:
    """Write a model of a standard size; any text for `quick` takes its quick form."""
    found = SIZES[size].quick() if quick else SIZES[size]
    torch.manual_seed(0)
    nemotron_h(found.shape).save_pretrained(directory)


if __name__ == "__main__":
    write(*sys.argv[1:])
