"""Checkpoints between Hugging Face's form and Megatron's.

    python -m examples.python.convert to-megatron HF_DIR MEGATRON_DIR
    python -m examples.python.convert to-huggingface MEGATRON_DIR HF_DIR [--like HF_EXAMPLE_DIR]

Weights keep their values: there and back every tensor is the same, bit for bit. A Hugging Face configuration says more
than the model needs, so the way back takes it, and names and types of tensors, from a checkpoint of the same
architecture, such as the one that training began with. Only a NemotronH is written without such an example.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

import torch

from megatron_ext.config import SourceConfig
from megatron_ext.models.huggingface.export import export_hf_checkpoint, save_hf_checkpoint
from megatron_ext.models.load import load_model, save_model


def to_megatron(source: str, target: str) -> None:
    """Hugging Face -> a distributed checkpoint, with the tokenizer, for `load_engine(load=...)` and `--load`."""
    save_model(target, load_model(SourceConfig(load_hf=source), {}, reads_prediction=True))


def to_huggingface(source: str, target: str, like: str | None, *, bf16: bool = False) -> None:
    """A distributed checkpoint, ours or one that Megatron-LM trained -> Hugging Face."""
    loaded = load_model(SourceConfig(load=source), {}, reads_prediction=True)
    if like is None:
        save_model(target, replace(loaded, dtype=torch.bfloat16) if bf16 else loaded, save_hf_checkpoint)
    else:
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
            command.add_argument("--like", help="a Hugging Face checkpoint of the same architecture")
            command.add_argument("--bf16", action="store_true", help="without an example: weights of 16 bits")
    args = parser.parse_args(argv)
    if args.way == "to-megatron":
        to_megatron(args.source, args.target)
    else:
        to_huggingface(args.source, args.target, args.like, bf16=args.bf16)
    print(f"{args.target} is written")


if __name__ == "__main__":
    main()
