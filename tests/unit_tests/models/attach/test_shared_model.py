"""Models of megatron-core as models of ours: shared tensors, and parts that are refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer.enums import AttnMaskType
from torch import nn

from megatron_ext.config import ParallelConfig
from megatron_ext.errors import ConfigError
from megatron_ext.mcore.weight_changes import saved_tensors
from megatron_ext.models.attach.modules import unwrapped
from megatron_ext.models.attach.shared_model import share_model
from tests.unit_tests.support import megatron_models as models

share = partial(share_model, parallel=ParallelConfig())


@pytest.fixture(scope="module", autouse=True)
def upstream() -> Iterator[None]:
    with models.stand_ins():
        yield


@pytest.mark.parametrize("name", models.KINDS)
def test_every_tensor_is_the_models_own(name: str) -> None:
    """Parameters and stored buffers are the caller's objects, each of them, and nothing lacks memory."""
    model = models.build(name)
    shared = share(model)
    ours, theirs = dict(shared.model.named_parameters()), dict(model.named_parameters())
    assert {id(one) for one in ours.values()} == {id(one) for one in theirs.values()}
    assert {*map(id, saved_tensors(shared.model).values())} <= {*map(id, saved_tensors(model).values())}
    assert not any(one.is_meta for one in [*ours.values(), *shared.model.buffers()])


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_views_of_one_flat_buffer(name: str) -> None:
    """Parameters that are views of one flat buffer stay views of it."""
    model = models.build(name)
    flat = torch.cat([one.detach().flatten() for one in model.parameters()])
    start = 0
    for parameter in model.parameters():
        parameter.data = flat[start : start + parameter.numel()].view(parameter.shape)
        start += parameter.numel()
    ours = share(model).model
    with torch.no_grad():
        flat.fill_(0.5)
    assert all(bool((one == 0.5).all()) for one in ours.parameters())
    addresses = {one.untyped_storage().data_ptr() for one in ours.parameters()}
    assert addresses == {flat.untyped_storage().data_ptr()}


def test_tied_embeddings_have_one_tensor() -> None:
    model = models.build("gpt2")
    ours = share(model).model
    assert ours.output_layer.weight is None
    assert ours.shared_embedding_or_output_weight() is model.shared_embedding_or_output_weight()


def test_experts_in_one_module_are_shared_in_their_order() -> None:
    """Transformer Engine has the weights of all experts of a layer in one module, by number."""
    model = models.build("hybrid, experts", fused=True)
    theirs = {id(one): name for name, one in saved_tensors(model).items()}
    ours = saved_tensors(share(model).model).items()
    experts = [(name.split(".local_experts.")[1], theirs[id(one)]) for name, one in ours if ".local_experts." in name]
    assert [ours[0] for ours, _ in experts] == [theirs[-1] for _, theirs in experts] != []


class Odd(nn.Module):
    """Module that no engine knows."""

    def forward(self, hidden: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        return hidden


def hook(*_: object) -> None:
    """Forward hook that changes nothing."""


def layer(model: nn.Module, index: int) -> nn.Module:
    return model.decoder.layers[index]


def set_field(name: str, value: object) -> Callable[[nn.Module], None]:
    return lambda model: setattr(model.config, name, value)


def with_subclass(model: nn.Module) -> None:
    attention = layer(model, 1).self_attention
    attention.__class__ = type("FasterAttention", (type(attention),), {"__module__": "a_program"})


def with_stride(model: nn.Module) -> None:
    weight = layer(model, 0).mlp.linear_fc1.weight
    weight.data = weight.data.t().contiguous().t()


def with_frequencies(model: nn.Module) -> None:
    model.rotary_pos_emb.inv_freq = model.rotary_pos_emb.inv_freq * 1.01


def add_twice(*_: object) -> None:
    """Residual sum of a program."""


# What the message names -> change of a model.
REFUSED: dict[str, Callable[[nn.Module], object]] = {
    r"decoder\.layers\.1\.mlp has the forward hook hook": lambda m: layer(m, 1).mlp.register_forward_hook(hook),
    r"decoder\.layers\.2 has the forward hook hook": lambda m: layer(m, 2).register_forward_pre_hook(hook),
    r"decoder\.layers\.1\.self_attention\.q_layernorm is of class .*Odd": (
        lambda m: setattr(layer(m, 1).self_attention, "q_layernorm", Odd())
    ),
    r"decoder\.layers\.1\.self_attention is of class a_program\.FasterAttention": with_subclass,
    r"decoder\.layers\.3\.mlp has a forward of its own": lambda m: setattr(layer(m, 3).mlp, "forward", hook),
    r"decoder\.layers\.0\.self_attention has a get_query_key_value_tensors of its own": (
        lambda m: setattr(layer(m, 0).self_attention, "get_query_key_value_tensors", hook)
    ),
    r"decoder\.layers\.0\.scale of the model has no place": (
        lambda m: setattr(layer(m, 0), "scale", nn.Parameter(torch.ones(1)))
    ),
    r"the model has no decoder\.layers\.0\.input_layernorm\.weight": (
        lambda m: delattr(layer(m, 0).input_layernorm, "weight")
    ),
    r"decoder\.layers\.1\.mlp\.linear_fc2\.weight of the model has shape \[32, 40\]": (
        lambda m: setattr(layer(m, 1).mlp.linear_fc2, "weight", nn.Parameter(torch.zeros(32, 40)))
    ),
    r"decoder\.layers\.2\.mlp\.linear_fc1\.weight of the model is of torch\.bfloat16": (
        lambda m: layer(m, 2).mlp.linear_fc1.bfloat16()
    ),
    r"embedding\.word_embeddings\.weight of the model is of torch\.float64": lambda m: m.double(),
    r"decoder\.layers\.0\.mlp\.linear_fc1\.weight of the model is not contiguous": with_stride,
    r"decoder\.layers\.1\.pre_mlp_layernorm\.weight .* eps = 0\.001": (
        lambda m: setattr(layer(m, 1).pre_mlp_layernorm, "eps", 1e-3)
    ),
    r"the model's rotary_pos_emb\.inv_freq": with_frequencies,
    r"rotary_pos_emb has seq_len_interpolation_factor = 2\.0": (
        lambda m: setattr(m.rotary_pos_emb, "seq_len_interpolation_factor", 2.0)
    ),
    r"decoder\.layers\.2\.self_attention has attn_mask_type": (
        lambda m: setattr(layer(m, 2).self_attention, "attn_mask_type", AttnMaskType.no_mask)
    ),
    r"decoder\.layers\.2 has mlp_bda = .*add_twice": lambda m: setattr(layer(m, 2), "mlp_bda", add_twice),
    "fp8 = 'e4m3'": set_field("fp8", "e4m3"),
    "quant_recipe": set_field("quant_recipe", object()),
    "context_parallel_size = 2": set_field("context_parallel_size", 2),
    "fp32_residual_connection = True": set_field("fp32_residual_connection", True),
    "apply_query_key_layer_scaling = True": set_field("apply_query_key_layer_scaling", True),
    "apply_residual_connection_post_layernorm = True": set_field("apply_residual_connection_post_layernorm", True),
    "multi_latent_attention = True": set_field("multi_latent_attention", True),
    "no_rope_freq = 2": set_field("no_rope_freq", 2),
    "heterogeneous_block_specs = True": set_field("heterogeneous_block_specs", True),
    "activation_func = relu": set_field("activation_func", F.relu),
    r"window_size = \(4, 4\)": set_field("window_size", (4, 4)),
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_part_that_cannot_be_run_exactly_is_refused_by_name(message: str) -> None:
    """One change of an accepted model is named."""
    model = models.build("llama")
    share(model)
    REFUSED[message](model)
    with pytest.raises(ConfigError, match=message):
        share(model)


@pytest.mark.parametrize(
    ("name", "value"), [("d_conv", 3), ("rmsnorm", False), ("norm_before_gate", True), ("D_has_hdim", True)]
)
def test_another_mixer_is_refused_by_name(name: str, value: object) -> None:
    model = models.build("hybrid")
    setattr(layer(model, 2).mixer, name, value)
    with pytest.raises(ConfigError, match=rf"^decoder\.layers\.2\.mixer has {name} = {value}"):
        share(model)


def test_gelu_in_its_approximation_is_refused() -> None:
    """Megatron's fused bias and GELU computes the approximation with tanh."""
    model = models.build("gpt2")
    model.config.bias_activation_fusion = True
    with pytest.raises(ConfigError, match="bias_activation_fusion = True with gelu"):
        share(model)


def test_fields_without_effect_are_accepted() -> None:
    """Dropout, recomputation and communication of training change nothing that an engine computes."""
    model = models.build("llama", hidden_dropout=0.3, attention_dropout=0.2, deterministic_mode=True)
    model.config.recompute_granularity, model.config.sequence_parallel = "full", True
    model.config.moe_aux_loss_coeff, model.config.barrier_with_L1_time = 0.01, False
    model.config.grad_scale_func = model.config.no_sync_func = hook
    assert share(model).config == share(models.build("llama")).config


class TestWrappers:
    """Models in wrappers, and lists of chunks."""

    def test_lists_and_unknown_wrappers(self) -> None:
        model = models.build("llama")
        assert unwrapped([model]) is unwrapped(nn.ModuleList([model])) is model
        with pytest.raises(ConfigError, match="a list of 2 chunks of a virtual pipeline"):
            share([model, models.build("llama")])
        with pytest.raises(ConfigError, match=r"^the model is of class torch\.nn\.modules\.container\.Sequential"):
            share(nn.Sequential(model))

    def test_hooks_of_overlapped_communication_are_refused(self) -> None:
        """Hooks of upstream's own wrapper gather parameters; the message says how they are removed."""
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

        model = models.build("llama")
        settings = DistributedDataParallelConfig(
            use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True
        )
        wrapped = DistributedDataParallel(model.config, settings, model)
        with pytest.raises(ConfigError, match=r"forward hook .*call disable_forward_pre_hook\(\)"):
            share(wrapped)
        wrapped.disable_forward_pre_hook(param_sync=False)
        assert share(wrapped).model.embedding.word_embeddings.weight is model.embedding.word_embeddings.weight

    def test_hooks_of_a_wrapper_are_refused(self) -> None:
        from megatron.core.transformer.module import Float16Module

        model = models.build("llama", bf16=True, params_dtype=torch.bfloat16)
        wrapped = Float16Module(model.config, model)
        wrapped.register_forward_hook(hook)
        with pytest.raises(ConfigError, match=r"^the model is in a Float16Module with forward hooks"):
            share(wrapped)
