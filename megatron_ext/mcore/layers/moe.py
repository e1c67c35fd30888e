"""Mixture-of-experts layers of megatron-core without Transformer Engine, on any device.

The parameters and their names are upstream's:

    router.weight [experts, h], router.expert_bias [experts] (a buffer, fp32)
    experts.local_experts.{i}.linear_fc1.weight [f, i], .linear_fc2.weight [i, f]: i is h, or the latent size
    shared_experts.linear_fc1.weight, .linear_fc2.weight
    fc1_latent_proj.weight [latent, h], fc2_latent_proj.weight [h, latent]

A single rank dispatches tokens to its experts with upstream's "allgather" dispatcher, which gathers nothing then;
several ranks exchange tokens, see `token_dispatch.py`. A token's result depends on no other token: nothing is dropped,
and no expert has a capacity.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from torch import Tensor, nn

from megatron_ext.errors import ConfigError
from megatron_ext.mcore.layers import grouped_moe
from megatron_ext.mcore.layers.dense_moe import compute_experts, has_fixed_shapes
from megatron_ext.mcore.layers.linear import ColumnLinear, RowLinear
from megatron_ext.mcore.layers.token_dispatch import SharedTokensDispatcher, is_alone
from megatron_ext.mcore.versions import builder
from megatron_ext.ops.linear import PackableLinear
from megatron_ext.ops.linear.few_rows import with_rows
from megatron_ext.runner.step_routing import record_routing

_ROUTER_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


class EagerRouter(TopKRouter):
    """`TopKRouter` that needs no Transformer Engine, stays on its device and compiles nothing.

    Upstream's router moves weights from the CPU to the current CUDA device, multiplies with a function that is
    undefined without Transformer Engine, and counts tokens in a method under `torch.compile`, which takes seconds per
    new shape, even at inference, where there is nothing to count.
    """

    def gating(self, input: Tensor) -> Tensor:  # noqa: A002 - upstream's name
        """Compute router logits in the configured type: [s, b, h] -> [s, b, experts]."""
        dtype = _ROUTER_DTYPES.get(self.config.moe_router_dtype, input.dtype)
        bias = None if self.bias is None else self.bias.to(dtype)
        multiply = partial(F.linear, weight=self.weight.to(dtype), bias=bias)
        rows = input.to(dtype)
        return with_rows(multiply, rows) if rows.is_cpu else multiply(rows)

    def routing(self, logits: Tensor, *args: object, **options: object) -> tuple[Tensor, Tensor]:
        """Choose the experts of [s, b, experts] logits as upstream does, and record them if the step asks for it."""
        probs, routing_map = super().routing(logits, *args, **options)
        record_routing(probs, routing_map, self.topk)
        return probs, routing_map

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Count each expert's tokens in training; a trainer updates `expert_bias` from these counts.

        Args:
            routing_map: [tokens, experts], True if a token goes to an expert.
            padding_mask: [tokens], True is padding.
        """
        if not (self.enable_expert_bias and self.training and torch.is_grad_enabled()):
            return
        if padding_mask is not None:
            routing_map = routing_map & ~padding_mask[:, None]
        self.local_tokens_per_expert += routing_map.sum(dim=0)


class LocalExperts(SequentialMLP):
    """`SequentialMLP` that skips experts without tokens and supports latent inputs.

    Args:
        latent_size: Width of inputs and outputs; None for the hidden size.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        submodules: MLPSubmodules,
        pg_collection: ProcessGroupCollection | None = None,
        latent_size: int | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(num_local_experts, _with_latent_size(config, latent_size), submodules, pg_collection)

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        """Compute tokens that are sorted by expert: [n, i] -> [n, i] times their weights [n], and no bias.

        With gradients enabled every expert runs, so that every parameter gets one.
        """
        if torch.is_grad_enabled():
            return super().forward(permuted_local_hidden_states, tokens_per_expert, permuted_probs)
        counts = tokens_per_expert.tolist()
        shares = zip(
            self.local_experts, permuted_local_hidden_states.split(counts), permuted_probs.split(counts), strict=True
        )
        outputs = [expert(tokens, weights)[0] for expert, tokens, weights in shares if len(tokens)]
        return torch.cat(outputs) if outputs else permuted_local_hidden_states, None


class LatentProjection(PackableLinear):
    """Linear layer replicated on every rank. Returns output and bias (None), as Megatron's layers do."""

    def __init__(
        self, input_size: int, output_size: int, config: TransformerConfig, init_method: Callable[[Tensor], object]
    ) -> None:
        super().__init__(input_size, output_size, bias=False, dtype=config.params_dtype)
        if config.perform_initialization:
            init_method(self.weight)

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]  # as Megatron has it
        """Compute [..., input_size] -> [..., output_size]."""
        return super().forward(hidden), None


class LocalMoELayer(MoELayer):
    """`MoELayer` built from the classes above; upstream insists on Transformer Engine for latent projections."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        is_mtp_layer: bool = False,
        name: str | None = None,
    ) -> None:
        latent_size = config.moe_latent_size
        mlp = MLPSubmodules(linear_fc1=ColumnLinear, linear_fc2=RowLinear)
        submodules = MoESubmodules(
            experts=builder(LocalExperts, mlp, latent_size=latent_size),
            shared_experts=builder(SharedExpertMLP, mlp),
            router=EagerRouter,
        )
        plain = _with_latent_size(config, None)
        super().__init__(plain, submodules=submodules, layer_number=layer_number, pg_collection=pg_collection)
        self.config = config
        self.groups = pg_collection or get_default_pg_collection()
        if not is_alone(self.groups):
            self.token_dispatcher = SharedTokensDispatcher(
                self.num_local_experts, self.local_expert_indices, plain, self.groups
            )
        if latent_size is not None:
            hidden = config.hidden_size
            self.fc1_latent_proj = LatentProjection(hidden, latent_size, config, config.init_method)
            self.fc2_latent_proj = LatentProjection(latent_size, hidden, config, config.output_layer_init_method)

    def forward(
        self, hidden_states: Tensor, intermediate_tensors: object = None, padding_mask: Tensor | None = None
    ) -> tuple[Tensor, None]:
        """Compute [s, b, h] -> [s, b, h] and no bias, as upstream, or by grouped products (`grouped_moe`)."""
        if intermediate_tensors is None and padding_mask is None and grouped_moe.supports(self, hidden_states):
            return grouped_moe.compute(self, hidden_states), None
        found: tuple[Tensor, None] = super().forward(hidden_states, intermediate_tensors, padding_mask)
        return found

    def routed_experts_compute(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """Compute dispatched tokens [n, i] by their experts; with fixed shapes, without per-expert counts."""
        if not has_fixed_shapes():
            output, _ = super().routed_experts_compute(hidden_states, probs)
            return output, None
        return compute_experts(self.experts, hidden_states, probs, self.token_dispatcher.routing_map), None


def reads_back(model: nn.Module) -> bool:
    """Return whether an eager forward reads numbers of tokens back from the device: experts without grouped products.

    Args:
        model: Model whose operators are chosen as in its forward.
    """
    layers = [module for module in model.modules() if isinstance(module, MoELayer)]
    return any(
        not isinstance(layer, LocalMoELayer) or not grouped_moe.supports(layer, next(layer.parameters()).new_empty(0))
        for layer in layers
    )


def check_routing_is_recorded(model: MegatronModule) -> None:
    """Check that all routers of a model are on this rank, and that each records its choices.

    Raises:
        ConfigError: The model has no MoE layers, pipeline stages, or MoE layers of a user's own.
    """
    flag = "--moe-enable-routing-replay"
    if model.config.pipeline_model_parallel_size > 1:
        raise ConfigError(
            f"{flag} with --pipeline-model-parallel-size {model.config.pipeline_model_parallel_size} is not supported: "
            "the routers are on several ranks; give 1, or leave the flag out"
        )
    routers = [module.router for module in model.modules() if isinstance(module, MoELayer)]
    if not routers:
        raise ConfigError(f"{flag} records the experts of tokens, and this model has none; leave it out")
    others = [type(router).__name__ for router in routers if not isinstance(router, EagerRouter)]
    if others:
        raise ConfigError(f"{flag} is not supported with routers of class {others[0]}; leave it or --spec out")


def _with_latent_size(config: TransformerConfig, latent_size: int | None) -> TransformerConfig:
    """Return the configuration, or a copy if its latent size differs."""
    if config.moe_latent_size == latent_size:
        return config
    changed = copy.copy(config)
    changed.moe_latent_size = latent_size
    return changed
