"""Save and load tiny models as Megatron-LM's training does, with the megatron-core on the path.

    PYTHONPATH=out/oracles/megatron-core-0.19.2 python as_megatron.py save --tp 2 --pp 2 OUT gpt hybrid

starts a process per rank, and writes OUT/gpt/iter_0000100 and so on with upstream's own writer. `load` reads OUT/gpt
and so on, which `--save` of this package wrote, with upstream's own reader, and compares every tensor.

Neither CUDA, Transformer Engine nor mamba-ssm is needed: the parts of models that need them are replaced below, and
nothing is computed. Every stored value is a function of its tensor's name and place (`values`), so the version and the
layout that wrote a checkpoint do not change it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

ITERATION = "iter_0000100"
KINDS = ("gpt", "gpt_moe", "hybrid", "hybrid_moe")
PATTERNS = {"hybrid": "M-M*-*", "hybrid_moe": "MEM*EM"}
GPT_PATTERNS = {"gpt": "*-*-*-*-", "gpt_moe": "*E*E*E*E"}  # of the hybrids that `--save` makes of GPTs
VOCABULARY = 512
SIZES = {
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 8,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
}
MAMBA = {"mamba_state_dim": 16, "mamba_head_dim": 16, "mamba_num_groups": 2}
EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 24,
    "moe_shared_expert_intermediate_size": 24,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
}
# Arguments of a run beside those of the model; Megatron-LM saves about a thousand.
RUN = {
    "bf16": True,
    "fp16": False,
    "params_dtype": torch.bfloat16,
    "ckpt_format": "torch_dist",
    "consumed_train_samples": 6400,
    "data_path": ["corpus_text_document"],
    "iteration": 100,
    "lr": 1e-4,
    "transformer_impl": "transformer_engine",
    "tokenizer_type": "NullTokenizer",
    "use_distributed_optimizer": False,
}
# A norm of a layer has the second key if it is fused with the linear layer after it, as in Transformer Engine's specs.
NORMS = {
    "norm.": "mixer.in_proj.layer_norm_",
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
_LAYER = re.compile(r"(decoder\.layers\.(?:\d+\.)?)(.*)")


def values(key: str, place: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
    """Return the whole tensor, fp32, that a key has.

    Args:
        key: Key with the number of its layer, and with its norms separate, see `canonical_key`.
        place: Indices of an expert.
        shape: Shape of the tensor, of one layer and one expert.
    """
    seed = int.from_bytes(hashlib.sha256(f"{key} {place}".encode()).digest()[:7], "little")
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    if "embedding" in key:
        return drawn
    return 0.15 * drawn if len(shape) > 1 else 1 + 0.3 * drawn


def canonical_key(key: str, place: tuple[int, ...] = ()) -> tuple[str, tuple[int, ...]]:
    """Return a key that neither stacked layers, fused norms nor separate experts change, and the place of an expert.

    Args:
        key: Key of a stored tensor.
        place: Indices in the axes that stack layers and experts.
    """
    if key.startswith("decoder.layers.") and not key.removeprefix("decoder.layers.")[0].isdigit():
        key, place = key.replace("decoder.layers.", f"decoder.layers.{place[0]}."), place[1:]
    for separate, fused in NORMS.items():
        key = key.replace(fused, separate)
    found = re.search(r"(?<=\.experts\.)(\d+)\.", key)
    if found:
        key, place = key.replace(f".experts.{found[0]}", ".experts."), (int(found[1]),)
    return key, place


def gpt_key(key: str) -> str:
    """Return a GPT's key for a key of the hybrid of its layers' halves."""
    key = re.sub(r"(?<=^decoder\.layers\.)\d+", lambda number: str(int(number[0]) // 2), key)
    return key.replace("decoder.final_norm.", "decoder.final_layernorm.")


def rename_norms(key: str, *, fused: bool) -> str:
    """Return the key of a layer's norm as one kind of spec or the other writes it; other keys are returned as given."""
    layer = _LAYER.fullmatch(key)
    if layer is None:
        return key
    rest = layer[2]
    for old, new in NORMS.items() if fused else [(new, old) for old, new in NORMS.items()]:
        if rest.startswith(old):
            rest = new + rest.removeprefix(old)
    return layer[1] + rest


def replace_cuda() -> None:
    """Replace what needs CUDA, Triton or mamba-ssm to build a model; must precede imports of megatron-core's models."""
    import megatron.core.ssm.mamba_mixer as mixer
    import megatron.core.tensor_parallel.random as random
    from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
    from torch import nn

    class GatedNorm(nn.Module):
        def __init__(self, size: int, *, device: Any = None, dtype: Any = None, **_: object) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(size, dtype=dtype))

        def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
            state = self.state_dict(prefix="", keep_vars=True)
            return make_sharded_tensors_for_checkpoint(state, prefix, {"weight": 0}, sharded_offsets)

    class Tracker:
        @contextlib.contextmanager
        def fork(self, *_: object) -> Iterator[None]:
            yield

        def is_initialized(self) -> bool:
            return True

    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.Stream = torch.cuda.Event = torch.cuda.synchronize = lambda *_, **__: None
    mixer.HAVE_MAMBA_SSM = True
    mixer.RMSNormGated = mixer.ExtendedRMSNorm = GatedNorm
    for module in [mixer, random, *sys.modules.values()]:
        if getattr(module, "__name__", "").startswith("megatron.") and hasattr(module, "get_cuda_rng_tracker"):
            module.get_cuda_rng_tracker = Tracker


def build(kind: str, tp: int, pp: int, patterns: dict[str, str]) -> torch.nn.Module:
    """Build this rank's part of a model, a hybrid if there is a pattern for its kind."""
    from megatron.core import parallel_state
    from megatron.core.transformer import TransformerConfig

    stage, pattern = parallel_state.get_pipeline_model_parallel_rank(), patterns.get(kind)
    options = {
        **SIZES,
        **(EXPERTS if "moe" in kind else {}),
        **(MAMBA | {"is_hybrid_model": True} if pattern else {}),
        "num_layers": len(pattern) if pattern else 4,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "pipeline_dtype": torch.float32,
        "use_cpu_initialization": True,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
    }
    config = TransformerConfig(**options)
    ends = {"pre_process": stage == 0, "post_process": stage == pp - 1}
    return build_hybrid(pattern, config, ends) if pattern else build_gpt(kind, config, ends)


def build_gpt(kind: str, config: Any, ends: dict[str, bool]) -> torch.nn.Module:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    experts = {"num_experts": EXPERTS["num_moe_experts"], "moe_grouped_gemm": False} if "moe" in kind else {}
    spec = get_gpt_layer_local_spec(normalization="RMSNorm", **experts)
    sharing = {"share_embeddings_and_output_weights": False, "position_embedding_type": "rope"}
    return GPTModel(config, spec, VOCABULARY, 4096, **sharing, **ends)


def build_hybrid(pattern: str, config: Any, ends: dict[str, bool]) -> torch.nn.Module:
    """Build a hybrid from megatron-core's own modules; its own spec has those of Transformer Engine."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    try:
        from megatron.core.models.hybrid import hybrid_block as block
        from megatron.core.models.hybrid.hybrid_model import HybridModel

        Stack, Submodules, pattern_name = block.HybridStack, block.HybridStackSubmodules, "hybrid_layer_pattern"
    except ImportError:  # before 0.18
        import megatron.core.ssm.mamba_block as block
        from megatron.core.models.mamba import MambaModel as HybridModel

        Stack, Submodules, pattern_name = block.MambaStack, block.MambaStackSubmodules, "hybrid_override_pattern"
    replace_cuda()  # in the modules just imported, too
    block.TENorm = WrappedTorchNorm
    linear = {"linear_proj": RowParallelLinear, "linear_qkv": ColumnParallelLinear}
    attention = SelfAttentionSubmodules(core_attention=DotProductAttention, **linear)
    mixer = MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
    mlp = ModuleSpec(MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear))
    experts = get_moe_module_spec(use_te=False, num_experts=EXPERTS["num_moe_experts"], moe_grouped_gemm=False)

    def transformer_layer(module: type, **parts: Any) -> ModuleSpec:
        return ModuleSpec(module, submodules=TransformerLayerSubmodules(**parts))

    layers = {
        "mamba_layer": ModuleSpec(
            MambaLayer,
            submodules=MambaLayerSubmodules(
                norm=WrappedTorchNorm,
                mixer=ModuleSpec(MambaMixer, params={"expand": 2, "d_conv": 4}, submodules=mixer),
                mamba_bda=get_bias_dropout_add,
            ),
        ),
        "attention_layer": transformer_layer(
            TransformerLayer,
            input_layernorm=WrappedTorchNorm,
            self_attention=ModuleSpec(SelfAttention, {"attn_mask_type": AttnMaskType.causal}, attention),
            self_attn_bda=get_bias_dropout_add,
        ),
        "mlp_layer": transformer_layer(
            MLPLayer, pre_mlp_layernorm=WrappedTorchNorm, mlp=mlp, mlp_bda=get_bias_dropout_add
        ),
        "moe_layer": transformer_layer(
            TransformerLayer, pre_mlp_layernorm=WrappedTorchNorm, mlp=experts, mlp_bda=get_bias_dropout_add
        ),
    }
    options = {pattern_name: pattern, "share_embeddings_and_output_weights": False, **ends}
    return HybridModel(config, ModuleSpec(Stack, submodules=Submodules(**layers)), VOCABULARY, 4096, **options)


def arguments(kind: str, tp: int, pp: int) -> argparse.Namespace:
    """Return the arguments of the run, under the names that the version has."""
    from megatron.core.enums import ModelType
    from megatron.core.safe_globals import SAFE_GLOBALS

    # A member of each enumeration that the version's own reader accepts.
    members = {one.__name__: next(iter(one)) for one in SAFE_GLOBALS if hasattr(one, "__members__")}
    model = {
        **SIZES,
        "group_query_attention": True,
        "swiglu": True,
        "norm_epsilon": 1e-5,
        "max_position_embeddings": 4096,
        "padded_vocab_size": VOCABULARY,
        "untie_embeddings_and_output_weights": True,
        "make_vocab_size_divisible_by": 128,
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "position_embedding_type": "rope",
        "rotary_base": 10000,
        "rotary_percent": 1.0,
        "num_layers": 4,
        "model_type": ModelType.encoder_or_decoder,
        "num_experts": None,
        "members": members,
    }
    if "moe" in kind:
        model |= {name: value for name, value in EXPERTS.items() if name != "num_moe_experts"}
        model |= {"num_experts": EXPERTS["num_moe_experts"], "moe_layer_freq": 1, "moe_grouped_gemm": True}
    if kind in PATTERNS:
        try:
            import megatron.core.models.hybrid.hybrid_model  # noqa: F401

            spec, name = ["megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"], "hybrid_layer_pattern"
        except ImportError:
            spec, name = ["megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"], "hybrid_override_pattern"
        model |= MAMBA | {name: PATTERNS[kind], "spec": spec, "num_layers": len(PATTERNS[kind])}
        model |= {"is_hybrid_model": True, "position_embedding_type": "none"}
    return argparse.Namespace(**RUN, **model)


def described_state(model: torch.nn.Module, metadata: dict[str, Any], *, fused: bool) -> dict[str, Any]:
    """Return what a model stores, by its own names, with the norms' keys of one kind of spec or the other."""
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    state = model.sharded_state_dict(metadata={**metadata, "dp_cp_group": group})
    for name, one in state.items():
        layer = _LAYER.fullmatch(name)
        has_experts = layer is not None and f"{layer[1]}mlp.router.weight" in state
        if not (has_experts and "pre_mlp_layernorm" in name):  # no linear layer follows
            one.key = rename_norms(one.key, fused=fused)
    return state


def fill(state: dict[str, Any], *, of_gpt: bool = False) -> None:
    """Write this rank's part of every tensor of a described state."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    for one in state.values():
        if isinstance(one, ShardedTensorFactory):
            for shard in nested_values({"": one.build()}):
                fill_shard(shard, of_gpt)
        elif isinstance(one, ShardedTensor):
            fill_shard(one, of_gpt)


@torch.no_grad()
def fill_shard(shard: Any, of_gpt: bool) -> None:
    stacked = shard.prepend_axis_num
    key, place = canonical_key(gpt_key(shard.key) if of_gpt else shard.key, tuple(shard.global_offset[:stacked]))
    starts = shard.global_offset[stacked:]
    box = tuple(slice(start, start + size) for start, size in zip(starts, shard.local_shape, strict=True))
    shard.data.copy_(values(key, place, tuple(shard.global_shape[stacked:]))[box])


def save(kind: str, options: argparse.Namespace) -> None:
    """Save a model with training state beside it; every rank calls this."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    model = build(kind, options.tp, options.pp, PATTERNS).bfloat16()
    metadata = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    model_state = described_state(model, metadata, fused=not options.local_norms)
    fill(model_state)
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    state = {
        "args": arguments(kind, options.tp, options.pp),
        "checkpoint_version": 3.0,
        "iteration": 100,
        "model": model_state,
        "opt_param_scheduler": {"max_lr": 1e-4, "num_steps": 6400},
        "num_floating_point_operations_so_far": 1.5e12,
        "rng_state": ShardedObject("rng_state", [{"torch_rng_state": torch.get_rng_state()}], (size,), (rank,)),
        "rerun": ShardedObject("rerun_state_machine_state", {"mode": "disabled"}, (size,), (rank,)),
    }
    if not options.no_save_optim:
        state["optimizer"] = {"param_groups": [{"lr": 1e-4, "step": 100}], "state": moments(model_state)}
    directory = options.folder / kind / ITERATION
    if rank == 0:
        directory.mkdir(parents=True)
    torch.distributed.barrier()
    more = {"verify_integrity": True} if options.digests else {}
    dist_checkpointing.save(state, str(directory), content_metadata=metadata, **more)
    if rank == 0:
        (options.folder / kind / "latest_checkpointed_iteration.txt").write_text("100")


def load(kind: str, options: argparse.Namespace) -> None:
    """Load a model that `--save` wrote, with no key missing or left over, and compare its values; bf16."""
    from megatron.core import dist_checkpointing

    model = build(kind, options.tp, options.pp, PATTERNS | GPT_PATTERNS).bfloat16()
    state = described_state(model, {}, fused=True)
    loaded = dist_checkpointing.load(dict(state), str(options.folder / kind), strict="raise_all")
    loaded = {name: value.clone() for name, value in loaded.items() if isinstance(value, torch.Tensor)}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    fill(described_state(model, {}, fused=True), of_gpt=kind in GPT_PATTERNS)
    expected = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    wrong = [name for name, value in expected.items() if not torch.equal(loaded[name], value)]
    if wrong or not expected:
        raise ValueError(f"{kind}: other values than saved in {wrong}")


def moments(state: dict[str, Any]) -> dict[str, Any]:
    """Return tensors of an optimizer, laid out as the parameters are."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    tensors = {name: one for name, one in state.items() if isinstance(one, ShardedTensor)}
    return {
        name: dataclasses.replace(one, key=f"optimizer.state.exp_avg.{one.key}", data=torch.zeros_like(one.data))
        for name, one in tensors.items()
    }


def run_rank(options: argparse.Namespace) -> None:
    """Save or load all kinds, as one rank of the world that the environment names."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    warnings.filterwarnings("ignore")
    torch.distributed.init_process_group("gloo", init_method=f"file://{options.store}", rank=rank, world_size=size)
    import megatron.core
    from megatron.core import parallel_state

    replace_cuda()
    parallel_state.initialize_model_parallel(options.tp, options.pp)
    for kind in options.kinds:
        (save if options.action == "save" else load)(kind, options)
    if rank == 0:
        print(f"{megatron.core.__file__}: {' '.join(options.kinds)}")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def main() -> int:
    """Run all ranks, or one of them; the exit code is 1 if a rank failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("save", "load"))
    parser.add_argument("folder", type=Path, help="directory with a folder for each kind")
    parser.add_argument("kinds", nargs="+", choices=KINDS)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--local-norms", action="store_true", help="keys of local specs, not of Transformer Engine's")
    parser.add_argument("--digests", action="store_true", help="write integrity.json (0.18 and later)")
    parser.add_argument("--no-save-optim", action="store_true", help="without an optimizer's state")
    parser.add_argument("--store", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.store is not None:
        run_rank(options)
        return 0
    size = options.tp * options.pp
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *sys.argv, f"--store={folder}/store"]
        environments = [os.environ | {"RANK": str(rank), "WORLD_SIZE": str(size)} for rank in range(size)]
        ranks = [subprocess.Popen(command, env=environment) for environment in environments]
        codes = [rank.wait() for rank in ranks]
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
