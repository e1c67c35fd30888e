"""Sampling options of each row of a step's logits, the same for eager and captured steps and for every backend.

R rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_ext.ops.varlen import to_device

GREEDY: Final = {"temperature": 1.0, "top_k": 0, "top_p": 0.0, "uniform": -1.0}
"""Neutral options, as of a row with temperature 0 and of a padding row, in int64 for integers, else float64."""


class SamplingMetadata(NamedTuple):
    """Sampling options of R rows, on the device.

    Attributes:
        temperature: [R] float64, positive.
        top_k: [R] int64; 0 is off.
        top_p: [R] float64 in [0, 1]; 0 is off, and so is 1, since it keeps every possible token.
        uniform: [R] float64 in [0, 1], one draw of each request's own generator; negative for greedy rows.
        host: The same by name on the host; None in captured steps, which must not depend on them.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    uniform: Tensor
    host: Mapping[str, np.ndarray] | None = None

    @classmethod
    def of(cls, parts: Mapping[str, Tensor], host: Mapping[str, np.ndarray] | None = None) -> SamplingMetadata:
        """Return the options among arrays by name."""
        return cls(parts["temperature"], parts["top_k"], parts["top_p"], parts["uniform"], host)

    @property
    def may_filter(self) -> bool:
        """False if neither `top_k` nor `top_p` is known to be on in any row."""
        if self.host is None:
            return True
        top_k, top_p = self.host["top_k"], self.host["top_p"]
        return bool(((top_k > 0) | ((top_p > 0) & (top_p < 1))).any())

    def select(self, rows: slice | np.ndarray) -> SamplingMetadata:
        """Return the options of some rows."""
        host = None if self.host is None else {name: column[rows] for name, column in self.host.items()}
        index = rows if isinstance(rows, slice) else to_device(torch.from_numpy(rows), self.uniform.device)
        return SamplingMetadata.of({name: getattr(self, name)[index] for name in GREEDY}, host)


def sampling_metadata(
    temperature: Sequence[float],
    top_k: Sequence[int],
    top_p: Sequence[float],
    uniform: Sequence[float],
    device: torch.device | str | None = None,
) -> SamplingMetadata:
    """Build a `SamplingMetadata` in one copy; each sequence has one entry per row."""
    columns = zip(GREEDY.items(), (temperature, top_k, top_p, uniform), strict=True)
    host = {name: np.asarray(column, np.asarray(neutral).dtype) for (name, neutral), column in columns}
    whole = to_device(torch.from_numpy(np.stack([column.view(np.int64) for column in host.values()])), device)
    dtypes = [torch.from_numpy(column).dtype for column in host.values()]
    parts = {name: part.view(dtype) for name, part, dtype in zip(host, whole.unbind(), dtypes, strict=True)}
    return SamplingMetadata.of(parts, host)
