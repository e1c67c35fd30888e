"""Console script `megatron-ext`: a command for each program of the package."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import megatron_ext

PROGRAM = "megatron-ext"


class Command(NamedTuple):
    """Command of the console script.

    Attributes:
        module: Module of the function, imported only for this command.
        function: Function that takes the arguments and the program's name, and returns the exit code.
        summary: Line of `--help`.
    """

    module: str
    function: str
    summary: str


COMMANDS = {
    "run": Command("megatron_ext.commands.run", "run_process", "run prompts; by default the shipped ones"),
    "serve": Command("megatron_ext.commands.serve", "main", "serve a model with OpenAI's API"),
    "chat": Command("megatron_ext.commands.chat", "main", "chat with a model in the terminal"),
    "simulate": Command("megatron_ext.commands.simulate", "main", "simulate the prefix cache on a trace of requests"),
    "prefix-cache": Command(
        "megatron_ext.commands.prefix_cache", "main", "list, verify or erase a prefix cache on disk"
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the first argument names.

    Returns:
        Exit code of the command.

    Raises:
        SystemExit: There is no such command, with exit code 2; or after `--help` and `--version`.
    """
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Inference of hybrid Transformer-Mamba models with prefix caching.",
        epilog="commands:\n" + "\n".join(f"  {name:12} {command.summary}" for name, command in COMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {megatron_ext.__version__}")
    parser.add_argument("command", choices=tuple(COMMANDS), metavar="COMMAND", help="COMMAND --help lists its flags")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="flags of the command")
    words = sys.argv[1:] if argv is None else argv
    if words and words[0] not in COMMANDS and not words[0].startswith("-"):
        from arguments.removed import refuse_removed_command  # imports all flags, which `--version` does without
        from megatron_ext.console.terminal import report_error
        from megatron_ext.errors import ConfigError

        try:
            refuse_removed_command(words[0])
        except ConfigError as error:
            return report_error(PROGRAM, error)
    parsed = parser.parse_args(words)
    command = COMMANDS[parsed.command]
    function = cast("Callable[..., int]", getattr(importlib.import_module(command.module), command.function))
    return function(parsed.arguments, program=f"{PROGRAM} {parsed.command}")
