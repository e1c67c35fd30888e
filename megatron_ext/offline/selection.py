"""Which of a run's results are written: every nth request and the last one, with throughput or without."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megatron_ext.config import RunConfig
from megatron_ext.offline.submission import Pass
from megatron_ext.scheduling.record import RequestRecord

_THROUGHPUT = "throughput"


def written(one: Pass, every: int) -> Iterator[tuple[int, RequestRecord]]:
    """Each `every`th request of a pass and the last one, with its place in the pass."""
    last = len(one.records) - 1
    return ((index, record) for index, record in enumerate(one.records) if index % every == 0 or index == last)


def selected(results: Mapping[str, object], run: RunConfig) -> dict[str, object]:
    """What of the file's keys is written."""
    if run.throughput_check_only:
        return {_THROUGHPUT: results[_THROUGHPUT]}
    return {key: value for key, value in results.items() if run.record_throughput or key != _THROUGHPUT}
