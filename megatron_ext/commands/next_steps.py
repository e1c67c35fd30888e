"""Lines printed around a first run, which has no flags: a greeting, and commands to try next."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_ext.console.terminal import Output

SCRIPT = "megatron-ext"
GREETING = "the embedded model answers the shipped prompts; see --help"
STEPS = (
    ("serve", "this model at http://127.0.0.1:8000, with OpenAI's API"),
    ('run DIR --prompts "..."', "your model's folder, in Hugging Face's form or Megatron's"),
    ("run --prefix-cache-compare", "these prompts with the cache off, then on"),
)


def has_flags(argv: Sequence[str] | None) -> bool:
    """Return whether a command line says anything; None is the process's own."""
    return bool(sys.argv[1:] if argv is None else argv)


def print_next_steps() -> None:
    """Print the commands to try after the first run, each with a short description."""
    command = script_command()
    lines = ["", "next:", *(line for step, what in STEPS for line in (f"  {command} {step}", f"      {what}"))]
    output = Output(sys.stdout)
    output.write("\n".join(lines) + "\n")
    output.flush()


def script_command() -> str:
    """Return the console script as this environment's users can type it."""
    if shutil.which(SCRIPT) is not None:
        return SCRIPT
    beside = Path(sys.executable).parent / SCRIPT
    return os.path.relpath(beside) if beside.exists() else f"{sys.executable} -m megatron_ext"
