"""Panics of libraries written in Rust, converted to errors of the checkpoint whose files caused them.

`tokenizers` compiles the regular expressions of a `tokenizer.json` and panics if one of them fails on a text. pyo3
raises a panic as an exception that derives from BaseException and cannot be imported: each library has its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from megatron_ext.errors import CheckpointError

CANNOT_ENCODE = "the tokenizer failed to encode this text"
CANNOT_DECODE = "the tokenizer failed to decode these tokens"
_PANIC = "pyo3_runtime", "PanicException"


@contextlib.contextmanager
def panics_as_errors(what: str) -> Iterator[None]:
    """Raise a panic within the block as an error of the checkpoint; every other exception passes.

    Args:
        what: Subject of the error's sentence, such as "the tokenizer cannot encode this text".

    Raises:
        CheckpointError: A panic.
    """
    try:
        yield
    except BaseException as error:  # a panic is not an Exception; all others are raised again
        if (type(error).__module__, type(error).__name__) != _PANIC:
            raise
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{what}: {reason}; the checkpoint needs another tokenizer") from None
