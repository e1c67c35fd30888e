"""Command lines of Megatron-LM's functional tests."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Mapping


def words_of(flags: Mapping[str, object]) -> list[str]:
    """Arguments that Megatron's shell script makes of `MODEL_ARGS`: values pass through xargs, `[a b]` is several."""
    words: list[str] = []
    for name, value in flags.items():
        if value is None:
            continue
        words.append(name)
        if value is not True:
            text = os.path.expandvars(str(value))
            with contextlib.suppress(ValueError):  # an apostrophe is not a quote
                text = " ".join(shlex.split(text))
            words += text[1:-1].split() if text.startswith("[") and text.endswith("]") else [text]
    return words
