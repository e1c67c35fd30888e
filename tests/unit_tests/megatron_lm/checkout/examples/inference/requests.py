"""Helper of the scripts beside it, imported as they do: `examples` is a namespace package of several checkouts."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from pathlib import Path


def add_script_args(parser: ArgumentParser) -> ArgumentParser:
    parser.add_argument("--prompts", nargs="+", default=[])
    parser.add_argument("--num-tokens-to-generate", type=int, default=6)
    parser.add_argument("--termination-id", type=int, default=None)
    parser.add_argument("--model-provider", default="gpt")
    parser.add_argument("--suspend-after", type=int, default=0, help="step after which the engine is suspended once")
    parser.add_argument("--output-path", type=Path, required=True)
    return parser


def write(path: Path, results: object) -> None:
    path.write_text(json.dumps(results), "utf-8")
