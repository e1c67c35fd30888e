"""`--help` of a command: the flags that most users need, by task; one group; the flags with a word; or everything."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from arguments.flags import Flag, FlagGroup, normalize_key

ALL = "all"
_BATCHING = "inference-dynamic-batching"
# Keys of the flags of the short help, by task; a command leaves out flags that it lacks.
TASKS: Mapping[str, Sequence[str]] = {
    "model": ("load", "load-hf", "tokenizer-model", "dtype", "cpu-weight-quantization"),
    "prompts and results": ("prompts", "prompt-file", "output-path"),
    "server": ("host", "port", "served-model-name", "api-key-file", "tool-call-parser", "reasoning-parser"),
    "generation": ("num-tokens-to-generate", "temperature", "top-p", "stop-words", "generation-config"),
    "memory": (
        "inference-max-seq-length",
        *(f"{_BATCHING}-{name}" for name in ("buffer-size-gb", "max-requests", "max-tokens")),
        "dry-run",
    ),
    "prefix cache": (
        f"{_BATCHING}-enable-prefix-caching",
        *("prefix-cache-dir", "prefix-cache-disk-gb", "explain-prefix-cache"),
    ),
    "speed": ("speculative-method", "num-speculative-tokens"),
    "several processes": ("tensor-model-parallel-size", "pipeline-model-parallel-size"),
}


class HelpAction(argparse.Action):
    """Action that prints the help that its value asks for, and ends the program.

    Args:
        groups: Groups of the command's own flags; the full help alone has Megatron's flags that set nothing.
        examples: Arguments of the command, as a user types them.
    """

    def __init__(
        self, option_strings: Sequence[str], dest: str, groups: Sequence[FlagGroup], examples: Sequence[str]
    ) -> None:
        text = f"Show the most used flags; {ALL}: all of them; a group's name; or a WORD of a flag's name or text"
        super().__init__(
            option_strings, argparse.SUPPRESS, nargs="?", default=argparse.SUPPRESS, metavar="WORD", help=text
        )
        self._groups, self._examples = groups, examples

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[object] | None,
        option_string: str | None = None,
    ) -> None:
        """Print the help and exit."""
        word = normalize_key(values.lower()) if isinstance(values, str) else ""
        if word == ALL:
            text = parser.format_help()
        else:
            text = self._about(parser, word) if word else self._short(parser)
        print(text, end="")
        parser.exit()

    def _short(self, parser: argparse.ArgumentParser) -> str:
        known = {flag.key: flag for group in self._groups for flag in group.flags}
        by_task = {task: [_shortest(known[key]) for key in keys if key in known] for task, keys in TASKS.items()}
        examples = "".join(f"  {parser.prog} {words}\n" for words in self._examples)
        names = ", ".join(_name(group) for group in self._groups)
        return (
            f"{_help_of(parser, by_task, with_description=True)}\nexamples:\n{examples}\n"
            f"--help={ALL} shows every flag, --help=WORD the flags that mention it, --help=GROUP a group:\n{names}\n"
            "Numbers may end in k, m or g (32k is 32,000), or in K, M or G (32K is 32,768).\n"
        )

    def _about(self, parser: argparse.ArgumentParser, word: str) -> str:
        """Return the groups that a word names, or else the flags with it in their names or texts."""
        named = [group for group in self._groups if _name(group).startswith(word)]
        spaced = word.replace("-", " ")
        found = {
            group.title: [
                flag
                for flag in group.flags
                if group in named or any(word in key for key in flag.keys) or spaced in flag.declared.help_text.lower()
            ]
            for group in named or self._groups
        }
        if not any(found.values()):
            names = ", ".join(_name(group) for group in self._groups)
            parser.error(f"--help={word}: no flag mentions it; give {ALL} or one of {names}")
        return _help_of(parser, found)


def _shortest(flag: Flag) -> Flag:
    """Return a flag under the shortest of its names only."""
    name = min(flag.names, key=len)
    return dataclasses.replace(flag, declared=dataclasses.replace(flag.declared, flag=name, aliases=()))


def _name(group: FlagGroup) -> str:
    """Return the name of a group for `--help=GROUP`: its title without remarks, with dashes."""
    return normalize_key(group.title.partition(" (")[0].lower().replace(" ", "-"))


def _help_of(
    parser: argparse.ArgumentParser, sections: Mapping[str, Iterable[Flag]], *, with_description: bool = False
) -> str:
    """Return the help of a parser with these flags only."""
    description = parser.description if with_description else None
    part = argparse.ArgumentParser(prog=parser.prog, usage=parser.usage, description=description, add_help=False)
    for title, flags in sections.items():
        section = part.add_argument_group(title)
        for flag in flags:
            flag.add_to(section.add_argument)
    return part.format_help()
