"""Mamba-1 fields of a decoded `config.json`."""

from __future__ import annotations

import math

from megatron_ext.models.huggingface.fields import Fields, size


def dt_rank(fields: Fields, name: str) -> int:
    """Return the rank of dt; if "auto" or absent, a sixteenth of the hidden size."""
    return math.ceil(size(fields, "hidden_size") / 16) if fields.get(name, "auto") == "auto" else size(fields, name)
