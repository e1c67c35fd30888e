"""Process with another library's kernels and none of our code: reads cases and writes the results.

`python -I library_process.py LIBRARY FOLDER INPUTS OUTPUTS`: the library's name and where its packages lie; files of
`torch.save`, of which the first is a list of (case, tensors by name), and the second a list of tensors by name.

A library's packages are made without running their `__init__`, which would import compiled parts that are not there, or
all of megatron-core: only the modules with kernels are loaded. Under Triton's interpreter what asks for a device is
answered; with one, everything runs there as it is.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

Tensors = dict[str, Tensor]

BARE = {
    "megatron-core": ("megatron", "megatron.core", "megatron.core.ssm", "megatron.core.ssm.ops"),
    "fla-core": ("fla.ops", "fla.ops.gated_delta_rule", "fla.ops.utils"),
}
"""Packages of which nothing but submodules is wanted."""


def make_packages(library: str, folder: Path) -> None:
    """Have the library found, and its BARE packages without what they import."""
    sys.path.insert(0, str(folder))
    for name in BARE[library]:
        package = types.ModuleType(name)
        package.__path__ = [str(folder.joinpath(*name.split(".")))]
        sys.modules[name] = package


def pretend_device() -> None:
    """Under the interpreter: the first configuration that there is, and a Hopper that is asked and not used."""
    from triton.runtime.autotuner import Autotuner

    Autotuner._bench = lambda *args, **kwargs: [0.0, 0.0, 0.0]
    torch.cuda.device = torch.cuda.device_of = lambda *_: contextlib.nullcontext()
    torch.cuda.get_device_capability = lambda *_: (9, 0)


def megatron_ssd(x, dt, A, B, C, D, states, starts, chunk_starts, last, chunk_sequences) -> Tensors:
    module = importlib.import_module("megatron.core.ssm.ops.ssd_combined")
    y = torch.empty_like(x)
    after, chunk_states = module.mamba_chunk_scan_combined_varlen(
        x, dt, A, B, C, 64, chunk_starts.int(), last.int(), chunk_sequences.int(), y,
        D=D, initial_states=states, return_raw_states=True, state_dtype=torch.float32,
    )  # fmt: skip
    return {"y": y, "states": after, "chunk_states": chunk_states}


def megatron_convolution(x, weight, bias, states, starts) -> Tensors:
    module = importlib.import_module("megatron.core.ssm.ops.causal_conv1d_varlen")
    return {"y": module.causal_conv1d_varlen_fn(x, weight, bias, starts.int(), initial_states=states)}


def megatron_convolution_step(x, weight, bias, pool, slots) -> Tensors:
    module = importlib.import_module("megatron.core.ssm.ops.causal_conv1d_triton")
    return {"y": module.causal_conv1d_update(x, pool, weight, bias, "silu", slots.int()), "pool": pool}


def update(*tensors: Tensor, **options: Tensor) -> Tensor:
    module = importlib.import_module("megatron.core.ssm.ops.mamba_ssm")
    return module.selective_state_update(*tensors, **options)


def headed(x: Tensor, dt: Tensor, A: Tensor, D: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dt, A and D of heads as `selective_state_update` takes them: the same for all channels, by strides of zero."""
    heads, channels = x.shape[1:]
    return dt[..., None].expand(-1, -1, channels), A[:, None, None], D[:, None].expand(heads, channels)


def ssd_step(x, dt, A, B, C, D, pool, slots) -> Tensors:
    wide_dt, wide_A, wide_D = headed(x, dt, A, D)
    wide_A = wide_A.expand(*wide_D.shape, pool.shape[-1])
    bias = torch.zeros_like(A)[:, None].expand(*wide_D.shape)
    y = update(pool, x, wide_dt, wide_A, B, C, wide_D, dt_bias=bias, state_batch_indices=slots.int())
    return {"y": y, "pool": pool}


def selective_step(u, delta, A, B, C, D, pool, slots) -> Tensors:
    bias = torch.zeros_like(D)
    return {"y": update(pool, u, delta, A, B, C, D, dt_bias=bias, state_batch_indices=slots.int()), "pool": pool}


def selective_scan(u, delta, A, B, C, D, states, starts) -> Tensors:
    """There is no kernel for prompts that needs no compiler: one for a token, of all sequences, after the other."""
    y, bias, states = torch.empty_like(u), torch.zeros_like(D), states.clone()
    lengths = starts.diff()
    for token in range(int(lengths.max())):
        slots = torch.nonzero(lengths > token)[:, 0]
        rows = starts[slots] + token
        y[rows] = update(
            states, u[rows], delta[rows], A, B[rows], C[rows], D, dt_bias=bias, state_batch_indices=slots.int()
        )
    return {"y": y, "states": states}


def delta_rule(q, k, v, g, beta, states, starts) -> Tensors:
    module = importlib.import_module("fla.ops.gated_delta_rule.fused_recurrent")
    y, after = module.fused_recurrent_gated_delta_rule(
        *(t[None].contiguous() for t in (q, k, v, g)), beta=beta[None].contiguous(), initial_state=states,
        output_final_state=True, use_qk_l2norm_in_kernel=True, cu_seqlens=starts,
    )  # fmt: skip
    return {"y": y[0], "states": after}


def delta_step(q, k, v, g, beta, pool, slots) -> Tensors:
    starts = torch.arange(len(slots) + 1, device=q.device)
    outputs = delta_rule(q, k, v, g, beta, pool[slots].contiguous(), starts)
    pool[slots] = outputs["states"]
    return {"y": outputs["y"], "pool": pool}


COMPUTE: dict[str, dict[str, Callable[..., Tensors]]] = {
    "megatron-core": {
        "causal_conv1d prefill": megatron_convolution,
        "causal_conv1d decode": megatron_convolution_step,
        "ssd prefill": megatron_ssd,
        "ssd decode": ssd_step,
        "selective_scan prefill": selective_scan,
        "selective_scan decode": selective_step,
    },
    "fla-core": {"gated_delta_rule prefill": delta_rule, "gated_delta_rule decode": delta_step},
}
"""Library -> what it computes of ours."""


def main(library: str, folder: str, inputs: str, outputs: str) -> None:
    make_packages(library, Path(folder))
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if is_interpreted:
        pretend_device()
    device = torch.device("cpu" if is_interpreted else "cuda")
    computed = []
    with torch.no_grad():
        for case, tensors in torch.load(inputs, weights_only=True):
            made = COMPUTE[library][case](**{name: t.to(device) for name, t in tensors.items()})
            computed.append({name: t.cpu() for name, t in made.items()})
    torch.save(computed, outputs)


if __name__ == "__main__":
    main(*sys.argv[1:])
