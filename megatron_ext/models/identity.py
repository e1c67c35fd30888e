"""Identity of a served model: short hashes of its configuration, its tokenizer and its weights.

Servers with equal configuration and tokenizer can answer for each other. The weights are a version: their hash takes
samples of the checkpoint's files, since reading all of them would double the time of loading.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import torch

from megatron_ext.config import ModelConfig
from megatron_ext.errors import ConfigError
from megatron_ext.files import open_regular
from megatron_ext.text.tokenizer import TextTokenizer, Tokenizer, ends_of

HASH_BYTES = 16
SAMPLES, SAMPLE_BYTES = 64, 4096  # of each file, evenly spaced; smaller files are read whole
WEIGHT_SUFFIXES = (".safetensors", ".distcp", ".pt", ".bin")
_LARGEST_LISTED = 4096  # for a tokenizer without a serialized form: number of ids whose texts are hashed


@dataclass(frozen=True)
class ModelIdentity:
    """Identity of a served model.

    Attributes:
        configuration: Hash of the model configuration and the type of its parameters.
        tokenizer: Hash of the tokenizer, its special tokens and its chat template.
        weights: Version of the weights; equal checkpoints have equal versions, and other ones most likely differ.
    """

    configuration: str = "-"
    tokenizer: str = "-"
    weights: str = "-"


def model_identity(
    config: ModelConfig, dtype: torch.dtype, tokenizer: Tokenizer, directory: Path | None, seed: int
) -> ModelIdentity:
    """Return the identity of a loaded model.

    Args:
        config: Configuration of the model.
        dtype: Type of its parameters.
        tokenizer: Tokenizer of the model.
        directory: Directory of the weights; None for random ones.
        seed: Seed of random weights.
    """
    configuration = _hash(json.dumps([config.to_dict(), str(dtype)], sort_keys=True, default=repr))
    weights = _hash(f"random {seed}") if directory is None else weights_version(directory)
    return ModelIdentity(configuration, tokenizer_hash(tokenizer), weights)


def tokenizer_hash(tokenizer: Tokenizer) -> str:
    """Return a hash of a tokenizer: its serialized form, or else samples of its vocabulary; tokens and template."""
    serialized = tokenizer.serialized if isinstance(tokenizer, TextTokenizer) else None
    if serialized is None:
        step = max(1, tokenizer.vocab_size // _LARGEST_LISTED)
        known = [one for one in range(0, tokenizer.vocab_size, step) if one in tokenizer.token_ids]
        serialized = "\0".join(tokenizer.detokenize([one], skip_special_tokens=False) for one in known)
    try:
        template = tokenizer.chat_template if isinstance(tokenizer, TextTokenizer) else None
    except ConfigError as error:
        template = str(error)
    special = tokenizer.vocab_size, tokenizer.bos, tokenizer.eod, ends_of(tokenizer)
    return _hash(json.dumps([serialized, template, special]))


def weights_version(directory: Path) -> str:
    """Return the version of a checkpoint: a hash of its files' names and sizes, and of samples of their contents.

    At most 256 KB of each file are read, however large it is.
    """
    found = blake2b(digest_size=HASH_BYTES)
    for name in sorted(name for name in os.listdir(directory) if name.endswith(WEIGHT_SUFFIXES)):
        with open_regular(directory / name) as file:
            size = os.fstat(file.fileno()).st_size
            found.update(f"{name}\0{size}\0".encode("utf-8", "surrogateescape"))
            for start in _starts(size):
                file.seek(start)
                found.update(file.read(SAMPLE_BYTES))
    return found.hexdigest()


def _starts(size: int) -> list[int]:
    """Return the first bytes of the samples: the whole file if it is small, else its beginning, end and between."""
    if size <= SAMPLES * SAMPLE_BYTES:
        return list(range(0, size, SAMPLE_BYTES))
    last = size - SAMPLE_BYTES
    return [last * number // (SAMPLES - 1) for number in range(SAMPLES)]


def _hash(text: str) -> str:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=HASH_BYTES).hexdigest()
