"""Identity of a loaded model: hashes of its tokenizer and weights, and everything that cached entries depend on.

Weights have a hash of samples of their files, and a digest of the tensors in memory, whole.
"""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path

import torch

from megatron_ext.config import ParallelConfig
from megatron_ext.errors import ConfigError
from megatron_ext.files import open_regular
from megatron_ext.mcore import platform
from megatron_ext.models.load import LoadedModel
from megatron_ext.parallel.parallel_context import ParallelContext
from megatron_ext.text.tokenizer import TextTokenizer, Tokenizer, ends_of

HASH_BYTES = 16
SAMPLES, SAMPLE_BYTES = 64, 4096  # of each file, evenly spaced; smaller files are read whole
WEIGHT_SUFFIXES = (".safetensors", ".distcp", ".pt", ".bin")
_LARGEST_LISTED = 4096  # for a tokenizer without a serialized form: number of ids whose texts are hashed
_DIGEST_BYTES = 32
_THREADS = 8  # each copies a tensor to host memory and hashes it; both release the GIL


def cache_facts(
    loaded: LoadedModel,
    weights: bytes,
    parallel: ParallelConfig | None = None,
    parallel_context: ParallelContext | None = None,
) -> list[bytes]:
    """Return what cached entries depend on that an engine does not know; see `cache_identity`. Every rank calls this.

    Args:
        weights: Digest of this rank's weights; see `weights_digest`.
        parallel_context: All ranks; None for a world of one.
    """
    tokenizer = tokenizer_hash(loaded.tokenizer).encode()
    if parallel_context is None:
        return [tokenizer, weights, b"one rank"]
    everywhere = sorted(set(parallel_context.gather(weights)))  # an entry depends on the weights of all ranks
    here, sizes = parallel_context.here, platform.group_sizes(parallel)
    return [tokenizer, *everywhere, f"tensor {here.tensor}, stage {here.pipeline} of {sizes.described()}".encode()]


def tokenizer_hash(tokenizer: Tokenizer) -> str:
    """Return a hash of a tokenizer: its serialized form, or else samples of its vocabulary; tokens and template."""
    serialized = tokenizer.serialized if isinstance(tokenizer, TextTokenizer) else None
    if serialized is None:
        step = max(1, tokenizer.vocab_size // _LARGEST_LISTED)
        known = [one for one in range(0, tokenizer.vocab_size, step) if one in tokenizer.token_ids]
        serialized = "\0".join(tokenizer.detokenize([one], skip_special_tokens=False) for one in known)
    template: object
    try:
        named = tokenizer.chat_templates.named if isinstance(tokenizer, TextTokenizer) else {}
        template = dict(named) if len(named) > 1 else next(iter(named.values()), None)
    except ConfigError as error:
        template = str(error)
    special = tokenizer.vocab_size, tokenizer.bos, tokenizer.eod, ends_of(tokenizer)
    text = json.dumps([serialized, template, special])
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=HASH_BYTES).hexdigest()


def weights_hash(directory: Path) -> str:
    """Return a hash of a checkpoint: of its files' names and sizes, and of samples of their contents.

    Equal checkpoints have equal hashes, and others most likely differ. At most 256 KB of each file are read, however
    large it is: reading all of them would double the time of loading.
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


def weights_digest(model: torch.nn.Module) -> bytes:
    """Return a digest over names, types, shapes and values of this rank's parameters and buffers."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    found = blake2b(digest_size=_DIGEST_BYTES)
    with ThreadPoolExecutor(_THREADS) as threads:
        for one in threads.map(_tensor_digest, *zip(*tensors, strict=True)):
            found.update(one)
    return found.digest()


def _tensor_digest(name: str, tensor: torch.Tensor) -> bytes:
    found = blake2b(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode(), digest_size=_DIGEST_BYTES)
    found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.digest()
