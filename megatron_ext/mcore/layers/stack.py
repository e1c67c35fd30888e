"""Stack of layers without Transformer Engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.core.inference.contexts import BaseInferenceContext
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.utils import WrappedTensor
from torch import Tensor, nn

from megatron_ext.config.layers import is_recurrent
from megatron_ext.mcore.layers.layer_config import LayerConfig
from megatron_ext.mcore.layers.norms import LayerNormFromConfig
from megatron_ext.mcore.layers.residual_layers import ResidualStream, is_plain_inference
from megatron_ext.mcore.versions import Stack, StackSubmodules

_SUBMODULES = {
    "M": "mamba_layer",
    "*": "attention_layer",
    "-": "mlp_layer",
    "E": "moe_layer",
    "P": "parallel_layer",
    "A": "normed_attention_layer",
    "F": "normed_mlp_layer",
    "W": "windowed_attention_layer",
}


@dataclass
class HybridStackSubmodules(StackSubmodules):
    """Layer spec for each letter of a pattern."""

    parallel_layer: ModuleSpec | type = IdentityOp
    normed_attention_layer: ModuleSpec | type = IdentityOp
    normed_mlp_layer: ModuleSpec | type = IdentityOp
    windowed_attention_layer: ModuleSpec | type = IdentityOp


class HybridStack(Stack):
    """Upstream's stack with all our layers and a final norm of torch, whose stages may hold any number of layers each.

    Upstream hard-codes Transformer Engine's norm and supports neither other layers nor a layout of stages, so this
    class builds the layers itself. Their names, their order and the sharded state are upstream's.

    Args:
        config: Includes the sizes of the stages.
        submodules: Specs of the layers.
        pg_collection: Process groups.
        pattern: One letter per layer of the whole model, from `HybridModel`; or upstream's models give one of the next
            two.
        hybrid_override_pattern: The same.
        layer_type_list: Letters of this stage's layers.
        pp_layer_offset: Number of layers before them.
    """

    def __init__(
        self,
        config: LayerConfig,
        submodules: HybridStackSubmodules,
        *,
        pg_collection: ProcessGroupCollection,
        pattern: str | None = None,
        hybrid_override_pattern: str | None = None,
        layer_type_list: Sequence[str] = (),
        pp_layer_offset: int = 0,
        pre_process: bool = True,
        post_process: bool = True,
        post_layer_norm: bool = True,
        **_: object,
    ) -> None:
        MegatronModule.__init__(self, config)
        self.pre_process, self.post_process, self.post_layer_norm = pre_process, post_process, post_layer_norm
        self.residual_in_fp32 = self.is_mtp_layer = False
        self.pg_collection, self.pp_group, self.tp_group = pg_collection, pg_collection.pp, pg_collection.tp
        self.input_tensor: Tensor | None = None
        whole = pattern or hybrid_override_pattern
        if whole is not None:
            stage = self.pp_group.rank()
            pp_layer_offset = get_transformer_layer_offset(config, pp_rank=stage)
            end = pp_layer_offset + get_num_layers_to_build(config, pp_rank=stage)
            layer_type_list = whole[pp_layer_offset:end]
        self.layer_type_list = list(layer_type_list)
        self.layers = nn.ModuleList(
            _build_layer(submodules, letter, config, index, pp_layer_offset, pg_collection)
            for index, letter in enumerate(self.layer_type_list)
        )
        self.num_layers_per_pipeline_rank = len(self.layers)
        if post_process and post_layer_norm:
            self.final_norm = LayerNormFromConfig(config, config.hidden_size)

    def mamba_state_shapes_per_request(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Return the shapes of one request's states in each recurrent layer of this stage; None without any."""
        layers = (layer for layer in self.layers if isinstance(layer, MambaLayer))
        return next((layer.mamba_state_shapes_per_request() for layer in layers), None)

    def forward(
        self,
        hidden_states: Tensor | WrappedTensor,
        attention_mask: Tensor | None = None,
        inference_context: BaseInferenceContext | None = None,
        rotary_pos_emb: Tensor | None = None,
        **options: object,
    ) -> Tensor:
        """Compute all layers, [s, b, h] -> [s, b, h]; upstream's forward if more features are needed."""
        is_static = inference_context is not None and inference_context.is_static_batching()
        is_plain = is_plain_inference(self)
        if is_static or not (is_plain or "P" in self.layer_type_list):  # upstream's forward passes no positions to P
            return super().forward(hidden_states, attention_mask, inference_context, rotary_pos_emb, **options)
        if not self.pre_process:
            assert self.input_tensor is not None, "the stage before has sent it"
            hidden_states = self.input_tensor
        elif isinstance(hidden_states, WrappedTensor):
            hidden_states = hidden_states.unwrap()
        stream = ResidualStream(hidden_states, is_plain=is_plain)
        inputs = {
            "attention_mask": attention_mask,
            "inference_context": inference_context,
            "rotary_pos_emb": rotary_pos_emb,
        }
        for layer in self.layers:
            stream.through(layer, inputs)
        return stream.normed(self.final_norm) if self.post_process and self.post_layer_norm else stream.states()


def _build_layer(
    submodules: HybridStackSubmodules,
    letter: str,
    config: LayerConfig,
    index: int,
    offset: int,
    groups: ProcessGroupCollection,
) -> nn.Module:
    """Build layer `index` of a stage with `offset` layers before it; transformer layers add the offset themselves."""
    spec = getattr(submodules, _SUBMODULES[letter])
    if is_recurrent(letter):
        options = {"layer_number": index + 1 + offset, "pp_layer_offset": offset}
    else:
        options = {"layer_number": index + 1}
    return build_module(spec, config=config, pg_collection=groups, **options)
