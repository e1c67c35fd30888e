"""Figure of the packages by layer, and of their imports, as they are in the code."""

from __future__ import annotations

import ast
from pathlib import Path

from tools.pages.drawing import KEPT, PLAIN, Drawing

PACKAGE = Path(__file__).parents[2] / "megatron_ext"
LEAVES = "leaves"  # modules beside the packages, such as errors.py: one box
WIDTH, LAYER, BOX, HEIGHT = 900, 62, 96, 28  # pixels: of the figure, of a layer, of a box


def imports() -> dict[str, set[str]]:
    """Packages that each package of `megatron_ext` imports, `LEAVES` among them."""
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    graph: dict[str, set[str]] = {LEAVES: set()}
    for package in sorted(packages):
        nodes = [node for path in (PACKAGE / package).rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
        modules = [(node.module or "").split(".") for node in nodes if isinstance(node, ast.ImportFrom)]
        others = {module[1] for module in modules if module[0] == PACKAGE.name and len(module) > 1} - {package}
        graph[package] = (others & packages) | ({LEAVES} if others - packages else set())
    return graph


def layers(graph: dict[str, set[str]]) -> list[list[str]]:
    """Packages by layer, the lowest first: a package is a layer above the highest one that it imports.

    Raises:
        ValueError: Packages import each other.
    """
    layer_of: dict[str, int] = {}
    while rest := sorted(graph.keys() - layer_of.keys()):
        ready = [package for package in rest if graph[package] <= layer_of.keys()]
        if not ready:
            raise ValueError(f"packages import each other: {', '.join(rest)}")
        layer_of |= {package: 1 + max(map(layer_of.__getitem__, graph[package]), default=-1) for package in ready}
    return [[name for name in layer_of if layer_of[name] == layer] for layer in range(max(layer_of.values()) + 1)]


def reached(graph: dict[str, set[str]], package: str) -> set[str]:
    """Packages that a package imports, directly or not."""
    return graph[package].union(*(reached(graph, other) for other in graph[package]))


def packages() -> Drawing:
    """Return the figure; an arrow is left out where a path of several says the same."""
    graph = imports()
    rows = layers(graph)
    drawing = Drawing(WIDTH, LAYER * len(rows), "Packages by layer: each imports from layers below it only")
    places = {
        package: (round(WIDTH * (index + 1) / (len(row) + 1)), LAYER * (len(rows) - layer) - LAYER / 2)
        for layer, row in enumerate(rows)
        for index, package in enumerate(row)
    }
    for package, (x, y) in places.items():
        for other in sorted(graph[package] - set().union(*(reached(graph, other) for other in graph[package]))):
            to_x, to_y = places[other]
            drawing.arrow(x, y + HEIGHT / 2, to_x, to_y - HEIGHT / 2)
    for package, (x, y) in places.items():
        drawing.box(x - BOX / 2, y - HEIGHT / 2, BOX, HEIGHT, package, PLAIN if package == LEAVES else KEPT)
    return drawing
