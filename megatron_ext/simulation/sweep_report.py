"""Report of a sweep: a table, JSON, and plots if matplotlib is installed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.table import Table

from megatron_ext.errors import ConfigError
from megatron_ext.simulation.sweep import PLACEMENTS, SPACING, Advice, Point, Settings


def table_of(points: Sequence[Point]) -> Table:
    """Return a table with a row for each point; skipped and lost tokens are shares of all prompt tokens.

    With a disk, so are those that were skipped because of entries from disk.
    """
    names = "GiB states block mode policy guesses blocks slots refused skipped lost ttft-p50 p90 p99".split()
    has_disk = any(point.disk is not None for point in points)
    names += ["from disk", "loads"] if has_disk else []
    table = Table(*names, box=None, pad_edge=False)
    for point in points:
        one = point.settings
        table.add_row(
            f"{one.memory_gib:g}",
            "-" if point.slots is None else share_text(one.state_share),
            str(one.block_size),
            one.mode,
            one.policy,
            "-" if not point.slots or one.mode == "align" else f"{one.placement} {one.spacing}",
            str(point.blocks),
            "-" if point.slots is None else str(point.slots),
            str(point.refused),
            f"{point.skipped_share:.3f}",
            f"{(point.lost_for_slots + point.lost_for_blocks) / max(1, point.prompt_tokens):.3f}",
            f"{point.ttft_p50:.3f}",
            f"{point.ttft_p90:.3f}",
            f"{point.ttft_p99:.3f}",
            *([] if point.disk is None else _disk_cells(point.disk, point.prompt_tokens)),
        )
    return table


def _disk_cells(disk: Mapping[str, object], prompt_tokens: int) -> tuple[str, str]:
    """Return the share of prompt tokens that entries from disk have saved, and the loads."""
    skipped, loads = disk["skipped_tokens"], disk["loads"]
    assert isinstance(skipped, int), "a number of tokens"
    return f"{skipped / max(1, prompt_tokens):.3f}", str(loads)


def share_text(share: float | None) -> str:
    """Return the share of the memory for snapshots as text."""
    return "any share" if share is None else f"{share:g}"


def lines_of(advice: Sequence[Advice]) -> list[str]:
    """Return the lines of the advice: the curve, a line for each memory size, and the flags."""
    lines = []
    for one in advice:
        best, given = one.best, one.given
        usual = (
            f"{given.settings.policy}, blocks of {given.settings.block_size}, "
            f"{share_text(given.settings.state_share)} for states"
        )
        lines.append(
            f"{best.settings.memory_gib:g} GiB: {best.skipped_share:.3f} of prompt tokens skipped, {one.gain:.2f} of "
            f"what {usual} skips ({given.skipped_share:.3f}): {' '.join(one.flags)}"
        )
    return lines


def results(
    trace: Mapping[str, object], points: Sequence[Point], advice: Sequence[Advice], machine: Mapping[str, float]
) -> dict[str, object]:
    """Return all results for JSON."""
    return {
        "trace": dict(trace),
        "machine": dict(machine),
        "points": [point.to_dict() for point in points],
        "advice": [
            {"memory_gib": one.best.settings.memory_gib, "gain": one.gain, "flags": list(one.flags)}
            | {"best": one.best.to_dict(), "compared_with": one.given.to_dict()}
            for one in advice
        ],
    }


def draw(points: Sequence[Point], folder: Path) -> list[Path]:
    """Plot skipped tokens and times to first token over memory, a line for each combination of the other settings.

    Raises:
        ConfigError: matplotlib is not installed, or the folder cannot be written.
    """
    pyplot = _pyplot()
    lines: dict[str, list[Point]] = {}
    for point in points:
        one = point.settings
        share = "" if point.slots is None else f", {share_text(one.state_share)} for states"
        lines.setdefault(f"{one.policy}, {one.mode}, blocks of {one.block_size}{share}{_placement(one)}", []).append(
            point
        )
    pictures = {"skipped_share": "prompt tokens skipped, share", "ttft_p50": "ttft p50, s", "ttft_p99": "ttft p99, s"}
    return [_picture(pyplot, lines, name, label, folder / f"{name}.png") for name, label in pictures.items()]


def _placement(settings: Settings) -> str:
    """Return the placement of opportunistic checkpoints; empty for the default."""
    usual = (settings.placement, settings.spacing) == (PLACEMENTS[0], SPACING)
    return "" if usual else f", {settings.placement} {settings.spacing}"


def _picture(pyplot, lines: Mapping[str, Sequence[Point]], name: str, label: str, path: Path) -> Path:  # type: ignore[no-untyped-def]  # a module
    figure, axes = pyplot.subplots(figsize=(8, 5))
    for title, points in lines.items():
        ordered = sorted(points, key=lambda point: point.settings.memory_gib)
        values = [getattr(point, name) for point in ordered]
        axes.plot([point.settings.memory_gib for point in ordered], values, marker="o", label=title)
    axes.set(xlabel="GiB of blocks and snapshots", ylabel=label)
    axes.legend(fontsize="small")
    return _save(pyplot, figure, path)


def draw_heat_map(shares: Mapping[tuple[int, int], float], path: Path) -> Path:
    """Plot the skipped share over shared (rows) and own tokens (columns) of prompts."""
    pyplot = _pyplot()
    shared, own = (sorted({pair[i] for pair in shares}) for i in range(2))
    figure, axes = pyplot.subplots(figsize=(7, 5))
    image = axes.imshow([[shares[row, column] for column in own] for row in shared], vmin=0, vmax=1, origin="lower")
    axes.set_xticks(range(len(own)), own)
    axes.set_yticks(range(len(shared)), shared)
    axes.set(xlabel="own tokens", ylabel="shared tokens")
    figure.colorbar(image, label="prompt tokens skipped, share")
    return _save(pyplot, figure, path)


def _save(pyplot, figure, path: Path) -> Path:  # type: ignore[no-untyped-def]  # a module and its figure
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120, bbox_inches="tight")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
    finally:
        pyplot.close(figure)
    return path


def _pyplot():  # type: ignore[no-untyped-def]  # an optional package
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError("plots need matplotlib; pip install 'megatron-ext[plots]', or leave out --plots") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
