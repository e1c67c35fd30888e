"""Layer specs that need nothing but torch: what `--spec megatron_ext.mcore.layer_specs hybrid_stack_spec` names.

In distributed checkpoints a norm has the key that it has in Megatron's own models, where Transformer Engine fuses it
into the linear layer after it; upstream's local specs of GPT do the same.
"""

from __future__ import annotations

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.ssm.mamba_block import MambaStackSubmodules
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megatron_ext.mcore.attention import PagedSelfAttention
from megatron_ext.mcore.moe import LocalMoELayer
from megatron_ext.mcore.stack import HeadNormFromConfig, HybridStack, LayerNormFromConfig
from megatron_ext.mixers.gated_delta_net import GatedDeltaNetMixer, GatedDeltaNetMixerSubmodules
from megatron_ext.mixers.mamba1 import Mamba1Mixer, Mamba1MixerSubmodules
from megatron_ext.mixers.mamba2 import Mamba2Mixer, Mamba2MixerSubmodules


def _recurrent_layer_spec(mixer: type, submodules: object) -> ModuleSpec:
    """A norm and a mixer, whatever its kind, with their residual."""
    return ModuleSpec(
        module=MambaLayer,
        submodules=MambaLayerSubmodules(
            norm=LayerNormFromConfig,
            mixer=ModuleSpec(module=mixer, submodules=submodules),
            mamba_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map={"norm.": "mixer.in_proj.layer_norm_"},
        ),
    )


mamba_layer_spec = _recurrent_layer_spec(
    Mamba2Mixer, Mamba2MixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
)
mamba1_layer_spec = _recurrent_layer_spec(
    Mamba1Mixer, Mamba1MixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
)
gated_delta_net_layer_spec = _recurrent_layer_spec(
    GatedDeltaNetMixer,
    GatedDeltaNetMixerSubmodules(
        in_proj=ColumnParallelLinear, out_norm=LayerNormFromConfig, out_proj=RowParallelLinear
    ),
)

attention_layer_spec = ModuleSpec(
    module=TransformerLayer,
    submodules=TransformerLayerSubmodules(
        input_layernorm=LayerNormFromConfig,
        self_attention=ModuleSpec(
            module=PagedSelfAttention,
            params={"attn_mask_type": AttnMaskType.causal},
            submodules=SelfAttentionSubmodules(
                linear_qkv=ColumnParallelLinear,
                core_attention=DotProductAttention,
                linear_proj=RowParallelLinear,
                q_layernorm=HeadNormFromConfig,
                k_layernorm=HeadNormFromConfig,
            ),
        ),
        self_attn_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map={"input_layernorm.": "self_attention.linear_qkv.layer_norm_"},
    ),
)

mlp_layer_spec = ModuleSpec(
    module=MLPLayer,
    submodules=TransformerLayerSubmodules(
        pre_mlp_layernorm=LayerNormFromConfig,
        mlp=ModuleSpec(
            module=MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        ),
        mlp_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map={"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"},
    ),
)

# A class in place of a spec: upstream takes classes that it does not know as they are, and warns of specs of such.
moe_layer_spec = ModuleSpec(
    module=MLPLayer,
    submodules=TransformerLayerSubmodules(
        pre_mlp_layernorm=LayerNormFromConfig, mlp=LocalMoELayer, mlp_bda=get_bias_dropout_add
    ),
)


def _stack_spec(recurrent_layer: ModuleSpec) -> ModuleSpec:
    """A stack whose recurrent layers, M in the pattern, are of one kind."""
    return ModuleSpec(
        module=HybridStack,
        submodules=MambaStackSubmodules(
            mamba_layer=recurrent_layer,
            attention_layer=attention_layer_spec,
            mlp_layer=mlp_layer_spec,
            moe_layer=moe_layer_spec,
        ),
    )


hybrid_stack_spec = _stack_spec(mamba_layer_spec)
mamba1_stack_spec = _stack_spec(mamba1_layer_spec)
gated_delta_net_stack_spec = _stack_spec(gated_delta_net_layer_spec)
