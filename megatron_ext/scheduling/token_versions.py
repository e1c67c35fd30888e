"""Versions of the weights that sampled a request's tokens, and of the weights that computed their prefixes."""

from __future__ import annotations

from typing import TypeAlias

Runs: TypeAlias = tuple[tuple[int, int], ...]
"""Versions of consecutive tokens, run-length coded: (version, number of tokens), in order."""


class TokenVersions:
    """Versions of one request's generated tokens; only its replica writes them.

    A token rests on the keys, values and states of all tokens before it. These are of one version too, the token's own,
    unless requests were to continue at a change of the weights: then the version of the oldest part counts.
    """

    def __init__(self) -> None:
        self._prefix = 0
        self._last: tuple[int, int] | None = None
        self._starts: list[tuple[int, int, int]] = []  # generated tokens before, version, version of the prefix

    def restore(self, own: Runs, prefix: Runs) -> None:
        """Set the versions of tokens that an earlier request has generated, by its record."""
        owns, prefixes = ([version for version, count in runs for _ in range(count)] for runs in (own, prefix))
        for position, pair in enumerate(zip(owns, prefixes, strict=True)):
            if not self._starts or self._starts[-1][1:] != pair:
                self._starts.append((position, *pair))

    def admit(self, version: int) -> None:
        """Note that the request begins, or begins again, to compute its tokens with these weights."""
        self._prefix = version

    def compute(self, generated: int, version: int) -> None:
        """Note that weights of a version computed a chunk of the request, before its tokens are appended.

        Args:
            generated: Number of generated tokens before that.
            version: Version of the weights.
        """
        if self._last == (version, self._prefix):
            return
        self._last = version, self._prefix
        if self._starts and self._starts[-1][0] == generated:  # nothing has been generated with those
            self._starts.pop()
        self._starts.append((generated, version, self._prefix))

    def runs(self, start: int, end: int) -> tuple[Runs, Runs]:
        """Return the versions of the generated tokens [start, end), and the versions of their prefixes.

        Without tokens, each has one empty run with the version that computed the last chunk, or no run before a chunk.
        """
        ends = [*(first for first, _, _ in self._starts[1:]), end]
        own: list[tuple[int, int]] = []
        prefix: list[tuple[int, int]] = []
        for (first, version, before), last in zip(self._starts, ends, strict=False):
            count = min(last, end) - max(first, start)
            if count > 0:
                _extend(own, version, count)
                _extend(prefix, before, count)
        if not own and self._last is not None:
            own, prefix = [(self._last[0], 0)], [(self._last[1], 0)]
        return tuple(own), tuple(prefix)


def part_of(runs: Runs, start: int, end: int) -> Runs:
    """Return the part of `runs` that covers the tokens [start, end)."""
    found: list[tuple[int, int]] = []
    first = 0
    for version, count in runs:
        inside = min(first + count, end) - max(first, start)
        if inside > 0:
            found.append((version, inside))
        first += count
    return tuple(found)


def joined(first: Runs, second: Runs) -> Runs:
    """Return the runs of two sequences of tokens, one after the other."""
    runs = [run for run in first if run[1]]
    for version, count in second:
        if count:
            _extend(runs, version, count)
    return tuple(runs)


def _extend(runs: list[tuple[int, int]], version: int, count: int) -> None:
    if runs and runs[-1][0] == version:
        runs[-1] = version, runs[-1][1] + count
    else:
        runs.append((version, count))
