"""FalconMamba checkpoints of Hugging Face: Mamba whose mixers normalize dt, B and C, without weights."""

from __future__ import annotations

from dataclasses import replace

from megatron_ext.models.huggingface.families.mamba import MAMBA

FALCON_MAMBA = replace(
    MAMBA,
    model_type="falcon_mamba",
    architecture="FalconMambaForCausalLM",
    fields=replace(
        MAMBA.fields,
        numbers={**MAMBA.fields.numbers, "mixer_rms_eps": ("mamba_inner_norm_epsilon", 1e-6)},
    ),
    constants={**MAMBA.constants, "mamba_inner_norm": "plain"},
)
