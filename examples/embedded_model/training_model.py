"""The embedded model as a training program has it: megatron-core's own classes, its local layers, one part a rank.

Megatron's Mamba layers need kernels of mamba-ssm, which are for a GPU. `cpu_layers` replaces them by a few lines of
torch, for the forward and its backward on a CPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_ext.config import ParallelConfig, SourceConfig
from megatron_ext.models.load import LoadedModel, load_model  # first: it puts the CPU stand-ins of torch.cuda in place
from megatron_ext.text.tokenizer import Tokenizer

from megatron.core import activations  # isort: skip
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add  # isort: skip
from megatron.core.ssm import mamba_mixer  # isort: skip
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules  # isort: skip
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules  # isort: skip
from megatron.core.ssm.mlp_layer import MLPLayer  # isort: skip
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear  # isort: skip
from megatron.core.transformer import TransformerConfig  # isort: skip
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules  # isort: skip
from megatron.core.transformer.dot_product_attention import DotProductAttention  # isort: skip
from megatron.core.transformer.enums import AttnMaskType  # isort: skip
from megatron.core.transformer.mlp import MLP, MLPSubmodules  # isort: skip
from megatron.core.transformer.spec_utils import ModuleSpec  # isort: skip
from megatron.core.transformer.torch_norm import WrappedTorchNorm  # isort: skip
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules  # isort: skip

try:
    from megatron.core.models.hybrid import hybrid_block as block
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    Stack, Submodules, PATTERN = block.HybridStack, block.HybridStackSubmodules, "hybrid_layer_pattern"
except ImportError:  # before 0.18
    from megatron.core.models.mamba import MambaModel as HybridModel
    from megatron.core.ssm import mamba_block as block

    Stack, Submodules, PATTERN = block.MambaStack, block.MambaStackSubmodules, "hybrid_override_pattern"


def load_training_model(tensor_parallel: int = 1) -> tuple[nn.Module, Tokenizer]:
    """Return this rank's part of the embedded model, in train mode, and its tokenizer.

    The process groups are created if they do not exist.
    """
    loaded = load_model(SourceConfig(), {}, parallel=ParallelConfig(tensor_model_parallel_size=tensor_parallel))
    return training_model(loaded, tensor_parallel), loaded.tokenizer


def training_model(loaded: LoadedModel, tensor_parallel: int = 1) -> nn.Module:
    """Return megatron-core's own model with the weights of a model of Mamba-2, attention and squared-ReLU layers."""
    shape = loaded.config
    config = TransformerConfig(
        num_layers=shape.layer_count,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.query_groups,
        kv_channels=shape.head_channels,
        normalization=shape.normalization,
        layernorm_epsilon=shape.norm_epsilon,
        activation_func=activations.squared_relu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        is_hybrid_model=True,
        mamba_state_dim=shape.mamba_state_dim,
        mamba_head_dim=shape.mamba_head_dim,
        mamba_num_heads=shape.mamba_heads,
        mamba_num_groups=shape.mamba_num_groups,
        use_mamba_mem_eff_path=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        use_cpu_initialization=True,
        perform_initialization=False,
        tensor_model_parallel_size=tensor_parallel,
    )
    model = HybridModel(
        config,
        layer_specs(),
        shape.vocab_size,
        shape.max_position_embeddings,
        **{PATTERN: shape.hybrid_override_pattern},
        share_embeddings_and_output_weights=not shape.untie_embeddings_and_output_weights,
    )
    copy_weights(loaded.model, model)
    return model.train()


def layer_specs() -> ModuleSpec:
    """Return Megatron's local layers: Mamba-2, attention and MLP."""
    linears = {"in_proj": ColumnParallelLinear, "out_proj": RowParallelLinear}
    mixer = ModuleSpec(MambaMixer, {"expand": 2, "d_conv": 4}, MambaMixerSubmodules(**linears))
    attention = ModuleSpec(
        SelfAttention,
        {"attn_mask_type": AttnMaskType.causal},
        SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear, core_attention=DotProductAttention, linear_proj=RowParallelLinear
        ),
    )
    mlp = ModuleSpec(MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear))
    norm, add = WrappedTorchNorm, get_bias_dropout_add
    parts = TransformerLayerSubmodules
    layers = {
        "mamba_layer": ModuleSpec(MambaLayer, submodules=MambaLayerSubmodules(norm=norm, mixer=mixer, mamba_bda=add)),
        "attention_layer": ModuleSpec(
            TransformerLayer, submodules=parts(input_layernorm=norm, self_attention=attention, self_attn_bda=add)
        ),
        "mlp_layer": ModuleSpec(MLPLayer, submodules=parts(pre_mlp_layernorm=norm, mlp=mlp, mlp_bda=add)),
    }
    return ModuleSpec(Stack, submodules=Submodules(**layers))


@torch.no_grad()
def copy_weights(source: nn.Module, target: nn.Module) -> None:
    """Copy parameters by name; since 0.19 a mixer has the convolution's parameters itself."""
    theirs = dict(source.named_parameters())
    for name, parameter in target.named_parameters():
        parameter.copy_(theirs[name] if name in theirs else theirs[name.replace(".conv1d_", ".conv1d.")])


# Stand-ins for a CPU


class GatedNorm(nn.Module):
    """RMS norm of mamba-ssm over groups of channels, after the gate."""

    def __init__(self, size: int, eps: float, group_size: int, norm_before_gate: bool, **_: object) -> None:
        super().__init__()
        assert not norm_before_gate
        self.weight = nn.Parameter(torch.ones(size))
        self.eps, self.group_size = eps, group_size

    def forward(self, y: Tensor, gate: Tensor) -> Tensor:
        """Return the norm of y [..., size] after its gate."""
        groups = (y * F.silu(gate)).unflatten(-1, (-1, self.group_size))
        return F.rms_norm(groups, (self.group_size,), eps=self.eps).flatten(-2) * self.weight


GatedNorm.__name__, GatedNorm.__module__ = "ExtendedRMSNorm", mamba_mixer.__name__  # engines go by the class's name


def scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, *, D: Tensor, dt_bias: Tensor, **_: object
) -> Tensor:
    """SSD of short sequences in its dual form, one masked product: x [b, t, h, p], B and C [b, t, g, n].

    Sums of decays are taken in fp64: their differences are small, and they are not.
    """
    dt = F.softplus(dt + dt_bias)  # [b, t, h]
    total = (dt.double() * A).cumsum(1).transpose(1, 2)  # [b, h, t]
    future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(future, float("-inf")).exp().float()
    scores = torch.einsum("btgn,bsgn->bgts", C, B).repeat_interleave(x.shape[2] // B.shape[2], 1)  # [b, h, t, s]
    return torch.einsum("bhts,bsh,bshp->bthp", scores * decay, dt, x) + D[:, None] * x


def squared_relu(x: Tensor) -> Tensor:
    """Square of ReLU; upstream's is under `torch.compile`, which takes minutes on a CPU."""
    return F.relu(x).square()


@contextlib.contextmanager
def cpu_layers() -> Iterator[None]:
    """Let Megatron's local layers be built and run without mamba-ssm."""
    with contextlib.ExitStack() as patches:
        for owner, name, value in (
            (mamba_mixer, "HAVE_MAMBA_SSM", True),
            (mamba_mixer, "ExtendedRMSNorm", GatedNorm),
            (mamba_mixer, "causal_conv1d_fn", None),  # upstream then calls torch's convolution
            (mamba_mixer, "mamba_chunk_scan_combined", scan),
            (activations, "squared_relu", squared_relu),
            (block, "TENorm", WrappedTorchNorm),
        ):
            patches.enter_context(mock.patch.object(owner, name, value, create=True))
        yield
