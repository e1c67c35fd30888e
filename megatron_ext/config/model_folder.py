"""Folder of a model, before anything of weight is imported: whether it is there, and of which form it is."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from megatron_ext.errors import ConfigError

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
# Files and folders of Megatron's distributed checkpoints, and beside their iterations.
_MEGATRONS = (".metadata", "common.pt", "latest_checkpointed_iteration.txt", "iter_*", "mp_rank_*")


def require_model_folder(name: str, given: str) -> Path:
    """Return the folder of a checkpoint, which is `given` by the flag `name`.

    Raises:
        ConfigError: It is no folder, cannot be read, or has no weights but GGUF's; with what to do.
    """
    path = Path(given)
    try:
        is_folder = stat.S_ISDIR(os.stat(given).st_mode)
        suffixes = {Path(file).suffix.lower() for file in (os.listdir(given) if is_folder else [given])}
    except (FileNotFoundError, ValueError):  # no path has a null character
        hint = "give the directory of a checkpoint"
        if HUB_NAME.fullmatch(given) and not path.parent.is_dir():
            hint = f"fetch it first, and give its folder: hf download {given} --local-dir {path.name}"
        raise ConfigError(f"{name} {given or repr(given)} does not exist; {hint}") from None
    except OSError as error:
        raise ConfigError(f"{name} {given}: {error.strerror}; give the directory of a checkpoint") from None
    if ".gguf" in suffixes and ".safetensors" not in suffixes:
        raise ConfigError(
            f"{name} {given}: GGUF is not supported; convert it (transformers reads it with gguf_file=, and writes the "
            "form that is read here with save_pretrained), or give the folder that it was made from"
        )
    if not is_folder:
        raise ConfigError(f"{name} {given} is not a directory; give the directory of a checkpoint")
    return path


def is_megatrons(folder: Path) -> bool:
    """Return whether a folder has a checkpoint in Megatron's form, rather than in Hugging Face's."""
    return any(next(folder.glob(name), None) is not None for name in _MEGATRONS)
