"""Identity of a loaded model: hashes of its tokenizer and weights, and everything that cached entries depend on.

Weights have a hash of samples, and a digest of their whole content, for which a checkpoint of many gigabytes is read
once: the digest is remembered beside it, with names, sizes, times and inodes of the files that it was made of, and is
believed while these agree. Without permission to write there it is kept in the user's cache. It guards against
mistakes: write access to a checkpoint is write access to its digest.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path

import torch

from megatron_ext.config import ParallelConfig
from megatron_ext.errors import CheckpointError, ConfigError
from megatron_ext.files import open_regular, read_json
from megatron_ext.mcore import platform
from megatron_ext.models.load import LoadedModel
from megatron_ext.models.megatron.directory import DIGEST_FILE
from megatron_ext.ops.cpp.library_build import cache_path
from megatron_ext.parallel.parallel_context import ParallelContext
from megatron_ext.text.tokenizer import TextTokenizer, Tokenizer, ends_of
from megatron_ext.trusted_path import UntrustedPathError, open_directory

HASH_BYTES = 16
SAMPLES, SAMPLE_BYTES = 64, 4096  # of each file, evenly spaced; smaller files are read whole
WEIGHT_SUFFIXES = (".safetensors", ".distcp", ".pt", ".bin")
_LARGEST_LISTED = 4096  # for a tokenizer without a serialized form: number of ids whose texts are hashed

logger = logging.getLogger(__name__)

FORMAT = 1
REMEMBERED_BYTES = 64 * 1024**2  # smaller checkpoints are read each time
_DIGEST_BYTES = 32
_PIECE = 8 * 1024**2  # bytes read at once
_THREADS = 8


def cache_facts(
    loaded: LoadedModel,
    weights: bytes,
    parallel: ParallelConfig | None = None,
    parallel_context: ParallelContext | None = None,
) -> list[bytes]:
    """Return what cached entries depend on that an engine does not know; see `cache_identity`.

    Args:
        weights: Digest of the weights; see `weights_digest`.
        parallel_context: All ranks; None for a world of one.
    """
    facts = [tokenizer_hash(loaded.tokenizer).encode(), weights]
    if parallel_context is None:
        return [*facts, b"one rank"]
    here, sizes = parallel_context.here, platform.group_sizes(parallel)
    return [*facts, f"tensor {here.tensor}, stage {here.pipeline} of {sizes.described()}".encode()]


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


FileFacts = list[list[object]]  # name, size, time of the last change in ns, inode


def weights_digest(loaded: LoadedModel) -> bytes:
    """Return the digest of a model's weights: of its checkpoint's files, or of its tensors if it has none."""
    return tensors_digest(loaded.model) if loaded.directory is None else files_digest(loaded.directory)


def tensors_digest(model: torch.nn.Module) -> bytes:
    """Return a digest over names, types, shapes and values of all parameters and buffers."""
    found = blake2b(digest_size=_DIGEST_BYTES)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        found.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.digest()


def files_digest(directory: Path) -> bytes:
    """Return a digest over names and contents of a checkpoint's files of weights, remembered or computed.

    Processes of one machine that start together do this one after the other, so that the later ones remember.
    """
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        return _files_digest(directory)
    finally:
        os.close(handle)


def _files_digest(directory: Path) -> bytes:
    facts = _facts(directory)
    key = blake2b(str(directory.resolve()).encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
    kept = (directory / DIGEST_FILE, cache_path().parent / "weights" / f"{key}.json")  # for a directory of others
    for path in kept:
        known = _remembered(path, facts)
        if known is not None:
            return known
    names = [str(one[0]) for one in facts]
    with ThreadPoolExecutor(min(_THREADS, max(1, len(names)))) as threads:
        digests = list(threads.map(lambda name: _file_digest(directory / name), names))
    found = blake2b(digest_size=_DIGEST_BYTES)
    for name, digest in zip(names, digests, strict=True):
        found.update(name.encode("utf-8", "surrogateescape") + b"\0" + digest)
    is_large = sum(os.path.getsize(directory / name) for name in names) >= REMEMBERED_BYTES
    if is_large and _facts(directory) == facts:
        _remember(kept, facts, found.digest())
    return found.digest()


def _facts(directory: Path) -> FileFacts:
    """Return what tells whether the files of weights have changed."""
    facts: FileFacts = []
    for name in sorted(name for name in os.listdir(directory) if name.endswith(WEIGHT_SUFFIXES)):
        status = os.stat(directory / name)
        facts.append([name, status.st_size, status.st_mtime_ns, status.st_ino])
    return facts


def _file_digest(path: Path) -> bytes:
    found = blake2b(digest_size=_DIGEST_BYTES)
    with open_regular(path, CheckpointError) as file:
        while piece := file.read(_PIECE):
            found.update(piece)
    return found.digest()


def _remembered(path: Path, facts: FileFacts) -> bytes | None:
    """Return the digest that a file has for these facts; None without one."""
    try:
        content = read_json(path)
        digest = bytes.fromhex(str(content.get("digest")))
    except (ConfigError, ValueError):
        return None
    is_known = content.get("format") == FORMAT and content.get("files") == facts and len(digest) == _DIGEST_BYTES
    return digest if is_known else None


def _remember(places: Sequence[Path], facts: FileFacts, digest: bytes) -> None:
    """Write a digest to the first place that can be written."""
    text = json.dumps({"format": FORMAT, "digest": digest.hex(), "files": facts})
    beside, cached = places
    if _write(beside, text):
        return
    with contextlib.suppress(OSError, UntrustedPathError):
        os.close(open_directory(cached.parent))
        if _write(cached, text):
            return
    logger.info("the digest of the weights can be kept neither in %s nor in %s", beside.parent, cached.parent)


def _write(path: Path, text: str) -> bool:
    """Replace a file as a whole; return whether that was possible."""
    part = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.replace(part, path)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink()
        return False
    return True
