"""Command `bench`: figures of a model in this process (`--load-hf DIR`), or of any OpenAI server (`--url URL`).

Without either the embedded model is measured. A server gets the same prompts from the same client, so that servers can
be compared; start each with an empty cache. Exit code 1 if a request failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from megatron_ext.bench.clients import AskError, Client, EngineClient, HttpClient, PendingOutput, closing
from megatron_ext.bench.figures import Figures, figures, rows
from megatron_ext.bench.load import Pace, serve
from megatron_ext.bench.page import NoPlots, page, require_matplotlib
from megatron_ext.bench.tables import table
from megatron_ext.bench.work import KINDS, Shape, dialogues

PROGRAM = "megatron-ext bench"
WARM_UP = 2  # words, and tokens


def main(argv: Sequence[str] | None = None, *, program: str = PROGRAM) -> int:
    """Measure, print a table, and write files.

    Returns:
        Exit code: 0 done, 1 a request failed, 2 bad usage.
    """
    arguments = _parser(program).parse_args(argv)
    try:
        if arguments.html is not None:
            require_matplotlib()
        answers, told = asyncio.run(_measure(arguments))
    except (NoPlots, AskError, ValueError) as error:
        print(f"{program}: error: {error}", file=sys.stderr)
        return 2
    about = _about(arguments, program, sys.argv[1:] if argv is None else argv)
    print(about)
    print(table(rows(told)))
    if arguments.json is not None:
        content = {"about": about.splitlines(), "settings": vars(arguments) | {"api_key": None}, "figures": told}
        Path(arguments.json).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    if arguments.html is not None:
        Path(arguments.html).write_text(page(about, answers, told), encoding="utf-8")
    failed = [one for all_of_kind in answers.values() for one in all_of_kind if one.error is not None]
    for message in dict.fromkeys(str(one.error) for one in failed[:3]):
        print(f"failed: {message}")
    return 1 if failed else 0


async def _measure(arguments: argparse.Namespace) -> tuple[dict[str, list[PendingOutput]], dict[str, Figures]]:
    shape = Shape(
        *(arguments.requests, arguments.prefix, arguments.prefixes, arguments.own, arguments.turns),
        *(arguments.generate, arguments.numbers, arguments.seed),
    )
    pace = Pace(arguments.concurrency, arguments.rate, arguments.seed)
    answers: dict[str, list[PendingOutput]] = {}
    told: dict[str, Figures] = {}
    async with closing(_client(arguments)) as client:
        await client.ask(shape.words(WARM_UP, "warm up"), WARM_UP, PendingOutput("warm up"))
        for kind in arguments.work:
            asked = dialogues(kind, shape)
            with tqdm(total=len(asked), desc=kind, disable=None) as bar:
                answers[kind], seconds = await serve(client, kind, asked, shape.generated, pace, bar.update)
            told[kind] = figures(answers[kind], seconds)
    return answers, told


def _client(arguments: argparse.Namespace) -> Client:
    if arguments.url is not None:
        extra = {"ignore_eos": True} if arguments.ignore_eos else {}
        return HttpClient(arguments.url, arguments.model, os.environ.get("OPENAI_API_KEY"), extra)
    given = {name: value for name in ("load", "load_hf") if (value := getattr(arguments, name)) is not None}
    return EngineClient(given | dict(map(_setting, arguments.set)), ignore_eos=arguments.ignore_eos)


def _setting(text: str) -> tuple[str, object]:
    """A setting of `load_engine` as in `bf16=true`; a value that is JSON is what it says, any other is a text."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--set {text}: give NAME=VALUE, as in max_requests=32")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _about(arguments: argparse.Namespace, program: str, argv: Sequence[str]) -> str:
    target = arguments.url or arguments.load_hf or arguments.load or "the embedded model"
    pace = f"{arguments.concurrency} at once" if arguments.rate is None else f"{arguments.rate:g} a second"
    machine = f"Python {platform.python_version()}, {os.cpu_count()} cores"
    return f"{target}, {pace}; {arguments.generate} tokens each; {machine}\ncommand: {program} {' '.join(argv)}"


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=program, description=__doc__)
    target = parser.add_mutually_exclusive_group()
    target.add_argument("--load-hf", metavar="DIR", help="a Hugging Face checkpoint, in an engine in this process")
    target.add_argument("--load", metavar="DIR", help="a checkpoint of ours or of Megatron-LM, likewise")
    target.add_argument("--url", help="a server of OpenAI's API; its key is the variable OPENAI_API_KEY")
    parser.add_argument("--model", help="with --url: default is the first one that it lists")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of load_engine")
    parser.add_argument("--work", nargs="+", choices=KINDS, default=list(KINDS))
    pace = parser.add_mutually_exclusive_group()
    pace.add_argument("--concurrency", type=_positive, default=8, help="clients at once; a chat is one")
    pace.add_argument("--rate", type=_rate, help="requests (or chats) that begin in a second, on average")
    shape = Shape()
    parser.add_argument("--requests", type=_positive, default=shape.requests, help="of each kind of work")
    parser.add_argument("--prefix", type=_positive, default=shape.prefix, help="words of a shared prefix")
    parser.add_argument("--prefixes", type=_positive, default=shape.prefixes)
    parser.add_argument("--own", type=_positive, default=shape.own, help="words of each prompt's own, and of a turn")
    parser.add_argument("--turns", type=_positive, default=shape.turns)
    parser.add_argument("--generate", type=_positive, default=shape.generated, help="tokens of each answer")
    parser.add_argument(
        "--numbers", type=_positive, help="prompts are numbers below this, for models without a tokenizer"
    )
    parser.add_argument("--ignore-eos", action="store_true", help="answers of full length; not every server knows it")
    parser.add_argument("--seed", type=int, default=shape.seed)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--html", metavar="FILE", help="a page with plots; needs matplotlib")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return value


def _rate(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} must be more than zero")
    return value
