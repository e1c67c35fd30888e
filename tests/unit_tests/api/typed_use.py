"""PY-1: programs that use the package, for type checkers. This file is never run: `make lint` reads it.

Each line with an `ignore` is a mistake that is found: an ignore that nothing needs is an error itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy
import torch

import megatron_ext
from megatron_ext import LoadedEngine, RequestParams, RequestRecord, StreamPart, load_engine


def right(texts: list[str], ids: list[list[int]], model: torch.nn.Module) -> Sequence[RequestRecord]:
    """All of this is fine."""
    with load_engine(load_hf="directory", bf16=True, inference_max_seq_length=4096) as engine:
        records: list[RequestRecord] = engine.generate("a text")
        records += engine.generate([1, 2, 3])
        records += engine.generate(texts) + engine.generate(ids)
        records += engine.generate(["a text", [1, 2]], [RequestParams(), RequestParams(top_k=3)])
        records += engine.generate(torch.tensor([1, 2])) + engine.generate(numpy.array([1, 2]))
        engine.update_weights(model.named_parameters(), partial=True)
        engine.update_weights(model.state_dict())
        blocks: int = engine.statistics().use.blocks_in_use
        return records[blocks:]


async def right_too(engine: LoadedEngine) -> tuple[str, list[StreamPart]]:
    """Correct use with other types."""
    record = await engine.generate_async("a text", RequestParams(stop_words=("a",)))
    parts = [part async for part in engine.stream([1, 2])]
    reason: str | None = parts[-1].finish_reason
    return record.generated_text + (reason or ""), parts


def wrong(engine: LoadedEngine) -> None:
    """Incorrect uses."""
    engine.generate(5)  # type: ignore[call-overload]
    engine.generate("a text", {"temperature": 1})  # type: ignore[call-overload]
    engine.generate(["a text"], [5])  # type: ignore[list-item]
    engine.stream(["two", "texts"])  # type: ignore[list-item]
    engine.update_weights({"name": 5})  # type: ignore[arg-type]
    print(engine.generate("a text")[0].generated_test)  # type: ignore[attr-defined]
    megatron_ext.load_motor()  # type: ignore[attr-defined]
    load_engine(load_hf={"a"})  # type: ignore[arg-type]
