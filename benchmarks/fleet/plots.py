"""Bars as SVG, by hand: nothing has to be installed, and equal figures give equal files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

COLOURS = ("#b9bfc6", "#8f98a3", "#667080", "#d08a2e", "#3b8f6b", "#2f5fa8", "#7a4fa3", "#a33b4f")
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 760, 300, 60, 50, 34


def bars(
    path: Path, title: str, groups: Sequence[str], series: Mapping[str, Sequence[float]], *, logarithmic: bool = False
) -> None:
    """A group of bars for each of `groups`, one of each series in it.

    Args:
        path: Path of the file.
        title: Above it.
        groups: Names of the groups.
        series: Name -> a value for each group.
        logarithmic: The axis begins at a hundredth.
    """
    top = max(0.1, *map(max, series.values())) * (3 if logarithmic else 1.15)
    ticks = [10.0**e for e in range(-2, math.ceil(math.log10(top)))] if logarithmic else [top * i / 4 for i in range(5)]

    def height(value: float) -> float:
        share = math.log10(max(value, 0.01) / 0.01) / math.log10(top / 0.01) if logarithmic else value / top
        return max(0.0, share) * (HEIGHT - TOP - BOTTOM)

    base, width = HEIGHT - BOTTOM, (WIDTH - LEFT - 10) / len(groups)
    parts = [f'<text x="{LEFT}" y="16" font-size="14" fill="#222">{title}</text>']
    for tick in ticks:
        y = base - height(tick)
        parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - 10}" y2="{y:.1f}" stroke="#e3e6ea"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end" fill="#555">{tick:.3g}</text>')
    bar = width * 0.84 / len(series)
    for g, group in enumerate(groups):
        left = LEFT + g * width + width * 0.08
        parts.append(
            f'<text x="{left + width * 0.42:.1f}" y="{base + 16}" text-anchor="middle" fill="#222">{group}</text>'
        )
        for s, (name, values) in enumerate(series.items()):
            x, tall = left + s * bar, height(values[g])
            parts.append(
                f'<rect x="{x:.1f}" y="{base - tall:.1f}" width="{bar - 2:.1f}" height="{tall:.1f}" '
                f'fill="{COLOURS[s]}"><title>{name}, {group}: {values[g]:.4g}</title></rect>'
            )
            label = f"{values[g]:.3g}"
            parts.append(
                f'<text x="{x + bar / 2 - 1:.1f}" y="{base - tall - 3:.1f}" text-anchor="middle" font-size="9" '
                f'fill="#333">{label}</text>'
            )
    for s, name in enumerate(series):
        x = LEFT + s * (WIDTH - LEFT) / len(series)
        parts.append(f'<rect x="{x:.1f}" y="{HEIGHT - 16}" width="10" height="10" fill="{COLOURS[s]}"/>')
        parts.append(f'<text x="{x + 14:.1f}" y="{HEIGHT - 7}" fill="#222">{name}</text>')
    body = "\n".join(parts)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="11">\n<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>\n{body}\n</svg>\n',
        encoding="utf-8",
    )
