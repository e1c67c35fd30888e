"""Checkpoints between Hugging Face's form and Megatron's.

    python -m examples.python.convert to-megatron HF_DIR MEGATRON_DIR
    python -m examples.python.convert to-huggingface MEGATRON_DIR HF_DIR --like HF_EXAMPLE_DIR

Weights keep their values: there and back every tensor is the same, bit for bit. A Hugging Face configuration says more
than the model needs, so the way back takes it, and names and types of tensors, from a checkpoint of the same
architecture, such as the one that training began with.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from megatron_ext.config import SourceConfig
from megatron_ext.models.huggingface.export import export_hf_checkpoint
from megatron_ext.models.load import load_model, save_model


def to_megatron(source: str, target: str) -> None:
    """Hugging Face -> a distributed checkpoint, with the tokenizer, for `load_engine(load=...)` and `--load`."""
    save_model(target, load_model(SourceConfig(load_hf=source), {}))


def to_huggingface(source: str, target: str, like: str) -> None:
    """A distributed checkpoint, ours or one that Megatron-LM trained -> Hugging Face."""
    loaded = load_model(SourceConfig(load=source), {})
    export_hf_checkpoint(target, loaded.model, loaded.config, like)


def main(argv: Sequence[str] | None = None) -> None:
    """Convert one checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ways = parser.add_subparsers(dest="way", required=True)
    for way in ("to-megatron", "to-huggingface"):
        command = ways.add_parser(way)
        command.add_argument("source")
        command.add_argument("target")
        if way == "to-huggingface":
            command.add_argument("--like", required=True, help="a Hugging Face checkpoint of the same architecture")
    args = parser.parse_args(argv)
    if args.way == "to-megatron":
        to_megatron(args.source, args.target)
    else:
        to_huggingface(args.source, args.target, args.like)
    print(f"{args.target} is written")


if __name__ == "__main__":
    main()
