"""Page of figures: one HTML file with a table and plots in it."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

from megatron_ext.bench.clients import PendingOutput
from megatron_ext.bench.figures import Figures, first_token, gaps, rows
from megatron_ext.bench.tables import cell

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse } td, th { border: 1px solid #ccc; padding: .2rem .7rem; text-align: right }
th:first-child, td:first-child { text-align: left } pre { white-space: pre-wrap; color: #555 } svg { max-width: 100% }
"""


class NoPlots(Exception):
    """Error if matplotlib is not installed."""


def require_matplotlib() -> None:
    """Raise `NoPlots` if plots cannot be drawn, before anything is measured."""
    try:
        import matplotlib  # noqa: F401 - only whether it is there
    except ImportError as error:
        raise NoPlots("--html needs matplotlib; install the package with its extra [plots]") from error


def page(about: str, answers: Mapping[str, Sequence[PendingOutput]], told: Mapping[str, Figures]) -> str:
    """Return the whole file.

    Args:
        about: Lines about the measured target and the machine.
        answers: Answers by kind of work.
        told: Figures of the answers.
    """
    lines = [(name, *(cell(value) for value in found.values())) for name, found in rows(told).items()]
    body = "".join(f"<tr>{''.join(f'<td>{escape(one)}' for one in line)}" for line in lines)
    table = f"<table><tr>{''.join(f'<th>{escape(one)}' for one in ('', *told))}{body}</table>"
    return "\n".join(
        (
            f"<!doctype html><html lang=en><meta charset=utf-8><title>Serving</title><style>{_STYLE}</style>",
            f"<h1>Serving</h1><pre>{escape(about)}</pre>{table}",
            _drawn(answers),
        )
    )


def _drawn(answers: Mapping[str, Sequence[PendingOutput]]) -> str:
    """Return all plots as one SVG, which loads nothing from elsewhere."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8), layout="constrained")
    (first, between), (whole, time) = figure.subplots(2, 2)
    for kind, all_of_kind in answers.items():
        ended = [one for one in all_of_kind if one.error is None and one.arrivals]
        _share(first, kind, [first_token(one) for one in ended])
        _share(between, kind, [gap for one in ended for gap in gaps(one)])
        _share(whole, kind, [one.ended - one.started for one in ended])
        _tokens(time, kind, ended)
    for axes, title in ((first, "time to first token"), (between, "between tokens"), (whole, "end to end")):
        axes.set(title=title, xlabel="ms", ylabel="share of them that take at most so long", xscale="log")
    time.set(title="tokens a second", xlabel="seconds since the first request of its kind", ylim=(0, None))
    for axes in (first, between, whole, time):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[1]:
            axes.legend()
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    text = file.getvalue()
    return text[text.index("<svg") :]


def _share(axes: Axes, kind: str, seconds: Sequence[float]) -> None:
    if seconds:
        ordered = sorted(1e3 * value for value in seconds)
        axes.step(ordered, [(i + 1) / len(ordered) for i in range(len(ordered))], where="post", label=kind)


def _tokens(axes: Axes, kind: str, ended: Sequence[PendingOutput]) -> None:
    """Plot the tokens of each second."""
    if not ended:
        return
    begin = min(one.started for one in ended)
    arrivals = [arrival - begin for one in ended for arrival in one.arrivals]
    counts = [0] * (int(max(arrivals)) + 1)
    for arrival in arrivals:
        counts[int(arrival)] += 1
    axes.plot([second + 0.5 for second in range(len(counts))], counts, marker=".", label=kind)
