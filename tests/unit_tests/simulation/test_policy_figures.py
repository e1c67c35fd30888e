"""Results of policies on recorded traces: written as JSON lines, and shown in a table."""

from __future__ import annotations

from pathlib import Path

from benchmarks.cases import Run
from benchmarks.simulation.policies import parts_of, policies
from benchmarks.simulation.policy_figures import read_cells, table
from megatron_ext.simulation.trace import Ids, Turn


def test_results_of_a_run_are_the_table(tmp_path: Path):
    run, output = Run(quick=True), tmp_path / "found.jsonl"
    settings = {"memories": (8.0,), "policies": ("lru",), "placements": ("off", "even"), "sessions": 2}
    policies(run, **settings, traces=("coding_agents_20",), output=str(output))
    cells = read_cells(output)
    assert [cell.part for cell in cells] == ["all", "all", "half A", "half A", "half B", "half B"]
    rows = {name: list(figures.values()) for name, figures in run.page["rows"].items()}
    assert len(rows) == 3
    for part, line in zip(("all", "half A", "half B"), table(cells).splitlines()[2:], strict=True):
        prompt_tokens, off, _, even, _ = rows[f"coding_agents_20, {part}, 8 GiB"]
        assert prompt_tokens == next(cell.prompt_tokens for cell in cells if cell.part == part)
        shown = f"| coding_agents_20 | {part} | 8 | {off:.4f} | {even:.4f} |".replace(" 0.", " .")
        assert line.startswith(shown)


def test_halves_keep_conversations_together():
    """Requests with equal first 1,024 tokens are a conversation where a trace names no sessions."""
    ids = Ids()
    starts = [ids.take(1024) for _ in range(40)]
    turns = [Turn(i, float(i), (starts[i % 40], ids.take(10)), ids.take(1)) for i in range(120)]
    parts = parts_of(turns, 30)
    assert {name: len(part) for name, part in parts.items()} == {"all": 90, "half A": 45, "half B": 45}
    first, second = ({turn.prompt[0] for turn in parts[name]} for name in ("half A", "half B"))
    assert not first & second
