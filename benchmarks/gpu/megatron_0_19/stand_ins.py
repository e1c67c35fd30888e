"""Stand-ins for packages that megatron-core 0.19.2 needs, used where they are not installed.

- mamba-ssm and causal-conv1d: kernels in Triton, which are Python files of their source archives, are used as they are;
  what their packages import at the top is compiled code that inference does not need. So where a package is there and
  cannot be imported, its modules are made importable without the file at its top.
- flash-attn: compiled for hours. Where none is installed, attention is computed by this project's own kernels for
  CUDA, over the peer's own pages; a remark says so. That is a gift to the peer, not a handicap: see the table of
  operators for what these kernels reach.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

ENOUGH = "2.8.3"  # as which version of flash-attn ours goes by; the peer asks for 2.7.3
_VERSION = re.compile(r"""^__version__\s*=\s*["']([^"']+)["']""", re.MULTILINE)


def install() -> list[str]:
    """Install stand-ins for missing packages, before megatron.core is imported.

    Returns:
        Remarks about replaced packages.

    Raises:
        ImportError: mamba-ssm or causal-conv1d is missing.
    """
    return [*without_top("mamba_ssm"), *without_top("causal_conv1d", causal_conv1d_fn=None), *_flash_attention()]


def without_top(name: str, **attributes: object) -> list[str]:
    """Make the modules of a package importable whose file at the top is not.

    Args:
        name: Name of the package.
        attributes: Attributes that the file would have had.

    Returns:
        A remark, if that was needed.

    Raises:
        ImportError: The package is missing.
    """
    try:
        importlib.import_module(name)
        return []
    except ModuleNotFoundError as error:
        if error.name == name:
            raise ImportError(
                f"{name} is missing; put the folder {name} of its source archive beside megatron"
            ) from error
    except (ImportError, OSError):
        pass
    for left in [module for module in sys.modules if module == name or module.startswith(f"{name}.")]:
        del sys.modules[left]
    (folder,) = _folders(name)
    found = _VERSION.search((folder / "__init__.py").read_text("utf-8"))
    package = ModuleType(name)
    package.__path__ = [str(folder)]
    package.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    package.__dict__.update(attributes, __version__="0" if found is None else found[1])
    sys.modules[name] = package
    return [f"{name} {package.__version__}: its Triton kernels, without what it compiles"]


def _folders(name: str) -> list[Path]:
    """Return the first folder on the path that holds a package of that name."""
    return [folder for entry in sys.path if (folder := Path(entry or ".") / name).joinpath("__init__.py").exists()][:1]


def _flash_attention() -> list[str]:
    """Install the stand-in unless a generation of flash-attn that the peer knows is installed."""
    for name in ("flash_attn", "flash_attn_3", "flashattn_hopper"):
        if importlib.util.find_spec(name) is not None:
            return []
    sys.modules["flash_attn"] = flash_attention_stand_in()
    return ["flash-attn is not installed: attention by megatron_ext's Triton kernels"]


def flash_attention_stand_in() -> ModuleType:
    """Module with the functions of flash-attn that the peer imports."""
    module = ModuleType("flash_attn")
    module.__spec__ = importlib.machinery.ModuleSpec("flash_attn", None)
    module.__dict__.update(
        __version__=ENOUGH, flash_attn_varlen_func=varlen_attention, flash_attn_with_kvcache=decode_attention
    )
    return module


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int] = (-1, -1),
    block_table: Tensor,
    return_attn_probs: bool = False,
) -> Tensor:
    """Compute flash-attn's variable-length attention over pages.

    Args:
        q: [T, Hq, D].
        k: [pages, tokens, Hkv, D].
        v: [pages, tokens, Hkv, D].
        cu_seqlens_q: [R+1] int32.
        cu_seqlens_k: [R+1] int32.
        max_seqlen_q: Not needed.
        max_seqlen_k: Not needed.
        softmax_scale: Factor of the scores.
        causal: True.
        window_size: (-1, -1).
        block_table: [R, W] int32.
        return_attn_probs: False.
    """
    _check(causal, window_size, has_more=return_attn_probs)
    lengths = cu_seqlens_k[1:].long() - cu_seqlens_k[:-1].long()
    return _paged(q, k, v, 0, (q.shape[0],), cu_seqlens_q, lengths, block_table, softmax_scale)


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int] = (-1, -1),
    block_table: Tensor,
    num_splits: int = 0,
) -> Tensor:
    """Compute flash-attn's `flash_attn_with_kvcache` without new keys: q and the result are [R, 1, Hq, D]."""
    _check(causal, window_size, has_more=q.shape[1] != 1)
    rows = q.shape[0]
    begins = torch.arange(rows + 1, device=q.device)
    one = _paged(q[:, 0], k_cache, v_cache, rows, (1,) * rows, begins, cache_seqlens, block_table, softmax_scale)
    return one.unsqueeze(1)


def _check(causal: bool, window_size: tuple[int, int], has_more: bool) -> None:
    if not causal or tuple(window_size) != (-1, -1) or has_more:
        raise NotImplementedError("the stand-in for flash-attn has causal attention without windows only")


def _paged(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    decoding: int,
    queries: tuple[int, ...],
    begins: Tensor,
    lengths: Tensor,
    table: Tensor,
    scale: float,
) -> Tensor:
    """Call this project's operator, whose lengths are computed on the device; so the call can be captured."""
    from megatron_ext.ops.paged_attention import PagedBatch, paged_attention

    size = keys.shape[1]
    most = (table.shape[1] * size,) * lengths.numel()
    batch = PagedBatch(decoding, queries, most, size, table.int(), begins.long(), lengths.long(), True)
    return paged_attention(q, keys, values, batch, scale=scale)
