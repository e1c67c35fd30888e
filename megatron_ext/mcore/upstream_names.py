"""Private names of megatron-core 0.16.1 and torch that this package calls, overrides or sets, by their location.

Only a test reads this table: it resolves each name against the installed version, and finds every private name in our
code that is neither ours nor listed. Start with that test when upgrading megatron-core.
"""

from __future__ import annotations

_INFERENCE = "megatron.core.inference"

UPSTREAM_NAMES = {
    f"{_INFERENCE}.engines.dynamic_engine.DynamicInferenceEngine": (
        "_cond",
        "_loop",
        "_notify_cond_for_new_request",
    ),
    f"{_INFERENCE}.text_generation_controllers.text_generation_controller.TextGenerationController": (
        "_get_stop_word_finished_ids_callback",
        "_init_dynamic_sampling_tensors",
    ),
    "megatron.core.transformer.attention.Attention": (
        "_apply_output_gate",
        "_get_pp_layer_offset_for_inference",
    ),
    "megatron.core.ssm.mamba_block.MambaStack": ("_select_layers_for_pipeline_parallel",),
    "megatron.core.transformer.moe.token_dispatcher.MoEAlltoAllTokenDispatcher": ("_maybe_dtoh_and_synchronize",),
    "megatron.core.transformer.moe.router.TopKRouter": ("_apply_expert_bias",),
    "megatron.core.dist_checkpointing.strategies.torch": ("_replace_state_dict_keys_with_sharded_keys",),
    "torch.distributed.distributed_c10d.ProcessGroupGloo": ("_Options",),
    "torch.nn.Module": ("_forward_hooks", "_forward_pre_hooks"),
    "torch.distributed.distributed_c10d.ProcessGroupGloo._Options": ("_devices", "_threads", "_timeout"),
}
