"""CU-8: checks of `benchmarks.gpu` must hold to pass, and an error in one part costs no other part."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from rich.console import Console

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import cases, device_time, operators, peer, phases, processes, right, shapes, speed, tables, work
from benchmarks.gpu.megatron_0_19 import stand_ins
from benchmarks.gpu.notes import Notes, read
from megatron_ext.ops import triton
from megatron_ext.ops.backends import preferring
from megatron_ext.ops.paged_attention import build_paged_batch, paged_attention
from megatron_ext.ops.triton import kernel_registry
from tests.unit_tests.support.source import ROOT

CPU = torch.device("cpu")
TINY = work.Work("float32", (128,), (1, 2), (2,), 1, 512)
PEER = os.environ.get("MEGATRON_0_19")


def record(tokens: list[int], log_probs: list[float]) -> SimpleNamespace:
    return SimpleNamespace(generated_tokens=tokens, generated_log_probs=log_probs)


def page(**found: float | str) -> dict:
    return {"found": found, "left_out": [], "failed": [], "seconds": 1.0}


def test_equal_up_to_a_tie():
    one, other = record([1, 2, 3], [-1.0, -2.0, -3.0]), record([1, 4, 9], [-1.0, -2.0001, -8.0])
    assert right.difference(one, other) == pytest.approx(1e-4)


def test_other_tokens_from_the_start_are_no_agreement():
    assert right.difference(record([1], [-1.0]), record([2], [-5.0])) == 4.0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["gpu"])
    assert gpu.main() == 2
    assert "no CUDA device is here" in capsys.readouterr().err


# What a part finds


def test_an_error_is_a_figure_and_the_rest_goes_on(tmp_path, capsys):
    """A peer that fails costs nothing: its error stands where its figures would."""
    notes = Notes(tmp_path / "figures.json", 60.0)
    assert not notes.attempt("bad", lambda: [][0])
    assert notes.attempt("good", lambda: {"tokens/s": 2.0})
    kept = read(tmp_path / "figures.json")
    assert kept is not None
    assert kept["found"] == {"bad": "IndexError: list index out of range", "tokens/s": 2.0}
    assert kept["failed"] == ["bad"]
    assert "IndexError" in capsys.readouterr().err


def test_what_there_is_no_time_for_is_left_out(tmp_path):
    """The next piece may take as long as the slowest one of its kind, and more."""
    clock = SimpleNamespace(now=0.0)

    def takes(seconds: float) -> dict[str, float]:
        clock.now += seconds
        return {str(seconds): 1.0}

    notes = Notes(tmp_path / "figures.json", 10.0, lambda: clock.now)
    assert notes.attempt("first", lambda: takes(5.0), like="long")
    assert not notes.attempt("second", lambda: takes(1.0), like="long")
    assert notes.attempt("third", lambda: takes(4.0), like="short")
    assert not notes.attempt("fourth", lambda: takes(0.1))
    kept = read(tmp_path / "figures.json")
    assert kept is not None
    assert (kept["found"], kept["left_out"]) == ({"5.0": 1.0, "4.0": 1.0}, ["second", "fourth"])
    assert kept["failed"] == []


WRITES = """
import json, sys, time
page = dict(found=dict(a=1.0), left_out=[], failed=[], seconds=0.0)
open(sys.argv[1], "w").write(json.dumps(page))
"""


@pytest.mark.parametrize(
    ("program", "found", "failed"),
    [
        (WRITES, {"a": 1.0}, []),
        (f"{WRITES}time.sleep(60)", {"a": 1.0, "the part": "did not end in 2 s, and was ended"}, ["the part"]),
        (f"{WRITES}sys.exit(139)", {"a": 1.0, "the part": "ended with exit code 139"}, ["the part"]),
        ("pass", {"the part": "wrote nothing"}, ["the part"]),
    ],
)
def test_what_a_part_found_is_there_however_it_ends(program, found, failed, tmp_path, monkeypatch):
    """A kernel that never ends, or takes its process with it, costs only the later figures of its part."""
    monkeypatch.setattr(processes, "GRACE", 0.0)
    monkeypatch.setattr(processes, "LEAST", 0.0)
    figures = tmp_path / "figures.json"
    ended = processes.run([sys.executable, "-c", program, str(figures)], figures, 2.0, {})
    assert (ended["found"], ended["failed"]) == (found, failed)


def test_without_time_nothing_is_begun(tmp_path):
    ended = processes.run(["/does/not/exist"], tmp_path / "figures.json", 1.0, {})
    assert ended["left_out"] == ["all of it"]


def test_time_is_kept_for_what_comes_later(tmp_path, monkeypatch):
    """A part gets all time that is not reserved for others; the peer comes last and is omitted if not installed."""
    given: dict[str, float] = {}

    def run_part(name: str, seconds: float, *_: object) -> dict:
        given[name] = seconds
        return page()

    monkeypatch.setattr(gpu, "run_part", run_part)
    options = gpu.arguments().parse_args(["--minutes", "9.5", "--figures", str(tmp_path / "all.json")])
    options.megatron_0_19 = None
    pages = gpu.measure(options, tmp_path, Console(file=io.StringIO()))
    assert list(pages) == [*shapes.KINDS, "operators"] == list(given)
    assert json.loads((tmp_path / "all.json").read_text()).keys() == pages.keys()
    given.clear()
    options.megatron_0_19 = tmp_path
    gpu.measure(options, tmp_path, Console(file=io.StringIO()))
    assert list(given)[-2:] == [peer.NAME, peer.WIDE]
    left = 60 * 9.5 - sum(gpu.LEAST[name] for name in list(given)[1:])
    assert given["mamba2"] == pytest.approx(left, abs=5)
    assert left > 2 * gpu.LEAST["mamba2"]


# What is timed


def test_without_a_profiler_there_is_the_time_that_passes(monkeypatch, capsys):
    """The profiler's library may be missing or refuse the device; no other figure is lost."""

    def refuses(**_: object) -> None:
        raise RuntimeError("no CUPTI")

    monkeypatch.setattr("torch.profiler.profile", refuses)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(device_time, "_said", set())
    taken, called = operators.seconds_of(lambda: None)
    assert taken == called > 0
    assert device_time.idle_share(lambda: None) != device_time.idle_share(lambda: None), "not a number"
    assert capsys.readouterr().err == "no profiler: no CUPTI\n"


def test_warm_prompts_share_what_cold_ones_do_not():
    served: list[list[list[int]]] = []
    found = work.first_tokens(served.append, lambda: None, 96, 2, 1000)
    assert {len(one) for prompts in served for one in prompts} == {96 + work.OWN}
    beginnings = [tuple(one[:96]) for prompts in served for one in prompts]
    cold, warm = beginnings[:4], beginnings[4:]
    assert len(set(cold)) == 4, "the ones that warm up and the timed ones share nothing"
    assert len(set(warm)) == 1
    assert warm[0] not in cold
    assert len({tuple(one) for prompts in served for one in prompts}) == 4 + len(warm), "no prompt comes twice"
    assert set(found) == {f"96 tokens, 2 at once, {what}" for what in ("cold ms", "warm ms", "cold over warm")}


def test_requests_decode_as_long_as_they_are_timed():
    """Rounds, the idle share and phases; one that warms up."""
    steps = shapes.WORK.steps
    assert shapes.WORK.generated >= 6 * steps + 3 * (steps // 2) + 16
    assert shapes.WORK.longest >= shapes.WORK.context + shapes.WORK.generated


def test_phases_are_not_counted_twice():
    clock = iter([0.0, 1.0, 4.0, 10.0])
    timer = phases.Timer(lambda: next(clock))
    place = SimpleNamespace(inner=lambda: None)
    place.outer = lambda: place.inner()
    with timer.timing(place, "outer", "outer"), timer.timing(place, "inner", "inner"):
        place.outer()
    assert dict(timer.own) == {"inner": 3.0, "outer": 7.0}


def test_every_phase_is_there():
    """Places are looked up by name, and left out where they are gone: that must not happen unseen."""
    assert [name for name, place in phases.PLACES.items() if not hasattr(*place)] == []


def test_speed_of_a_small_model(tmp_path):
    """All of `Speed`, with the cache seen to work: the second half of the prompts skips the prefix."""
    notes = Notes(tmp_path / "figures.json", 60.0)
    measured = speed.Speed(shapes.model_config("mamba2", shapes.SMALL), TINY, CPU, notes)
    measured.measure()
    assert notes.page["failed"] == []
    assert notes.page["left_out"] == []
    found = notes.page["found"]
    for row in ("2 decode, graphs, tokens/s", "2 decode, eager, tokens/s", "128 tokens, 2 at once, warm ms"):
        assert found[row] > 0
    for phase in ("plan_next", "write and send", "launch", "wait", "commit"):
        assert found[f"2 decode, {phase} ms"] > 0, phase


@pytest.mark.parametrize("kind", shapes.KINDS)
def test_models_are_filled(kind, monkeypatch):
    """Large matrices are made on the device; none of what the host left as it was allocated stays."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # memory that is allocated holds NaN
    try:
        model = shapes.filled_model(shapes.model_config(kind, shapes.SMALL), torch.float32, CPU)
    finally:
        torch.use_deterministic_algorithms(before)
    assert [name for name, one in model.named_parameters() if not one.isfinite().all()] == []


def test_operators_are_called_as_they_are(tmp_path):
    """Every case, by the operator chosen here and by plain torch."""
    notes = Notes(tmp_path / "figures.json", 60.0)
    operators.measure(notes, CPU, quick=True)
    assert notes.page["failed"] == []
    made = cases.Maker(cases.TINY, torch.float32, CPU).cases()
    for name, make in made.items():
        rate = f"{name}: {make().unit}/s"
        assert notes.page["found"][rate] > 0, name


@pytest.mark.kernels
@pytest.mark.parametrize("name", cases.Maker(cases.TINY, torch.bfloat16, CPU).cases())
def test_operators_have_kernels(name):
    """Every operator with a kernel is computed by Triton in the measured dtype, none of them by torch."""
    if not triton.can_be_imported():
        pytest.skip("triton cannot be imported")
    case = cases.Maker(cases.TINY, torch.bfloat16, CPU).cases()[name]()
    with torch.inference_mode(), preferring(triton.NAME), kernel_registry.watch() as launches:
        case.work()
    assert bool(launches) == case.has_reference


# The peer beside us


def test_the_peer_is_set_against_the_best_of_its_ways():
    ours = page(**{"8 decode, graphs, tokens/s": 300.0, "96 tokens, 1 at once, cold ms": 20.0, "other": 1.0})
    theirs = page(
        **{
            "8 decode, graphs, tokens/s": 100.0,
            "8 decode, graphs, async schedule, tokens/s": 150.0,
            "64 decode, graphs, tokens/s": 900.0,
            "96 tokens, 1 at once, cold ms": 30.0,
        }
    )
    table = tables.beside_table(ours, theirs, peer.NAME)
    assert list(table.columns[0].cells) == ["8 decode, graphs, tokens/s", "96 tokens, 1 at once, cold ms"]
    assert list(table.columns[3].cells) == ["2.00", "1.50"]


def test_a_folder_without_the_peer_is_a_line(tmp_path):
    """A peer process that finds this project's megatron-core first reports it in one line."""
    for name in ("mamba_ssm", "causal_conv1d"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    ended = peer.run_peer(peer.NAME, tmp_path, 60.0, tmp_path / "figures.json")
    assert ended["failed"] == ["start"]
    assert "is first on the path; 0.19 was expected" in str(ended["found"]["start"])


def test_a_failed_peer_is_a_line(capsys):
    pages = {"mamba2": page(ok=1.0), peer.NAME: page(start="ImportError: mamba_ssm is not there")}
    pages[peer.NAME]["failed"] = ["start"]
    tables.show(Console(width=160, highlight=False), pages)
    assert f"{peer.NAME}: start failed: ImportError: mamba_ssm is not there" in capsys.readouterr().out
    assert not gpu.is_well(pages[peer.NAME])


def test_a_job_travels(tmp_path):
    job = work.RequestSpec(shapes.LARGE.to_dict(), shapes.WORK, "bfloat16", 60.0, "figures.json")
    job.write(tmp_path / "job.json")
    there = work.RequestSpec.read(tmp_path / "job.json")
    assert there.work.longest == shapes.WORK.longest
    assert there.model["hybrid_override_pattern"] == shapes.LARGE.hybrid_override_pattern


def test_a_package_whose_top_cannot_be_imported(tmp_path, monkeypatch):
    """Modules of such a package can be imported, like those of mamba-ssm and causal-conv1d without compiled code."""
    folder = tmp_path / "half_a_package"
    folder.mkdir()
    (folder / "__init__.py").write_text('__version__ = "1.2"\nfrom half_a_package.compiled import missing\n')
    (folder / "compiled.py").write_text("import a_library_that_is_not_there\n")
    (folder / "kernels.py").write_text("ANSWER = 42\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    (remark,) = stand_ins.without_top("half_a_package", compiled_function=None)
    assert "half_a_package 1.2" in remark
    import half_a_package
    from half_a_package.kernels import ANSWER

    assert (ANSWER, half_a_package.compiled_function) == (42, None)
    with pytest.raises(ImportError, match="put the folder nowhere_at_all"):
        stand_ins.without_top("nowhere_at_all")
    for name in [name for name in sys.modules if name.startswith("half_a_package")]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize("is_decode", [True, False])
def test_attention_that_the_peer_is_lent(is_decode):
    """The stand-in computes flash-attn's function: queries of sequences over pages, with int32 lengths."""
    lengths, queries = [70, 5], [1, 1] if is_decode else [70, 5]
    keys, values = torch.randn(2, 4, 64, 2, 16).unbind()
    q, table = torch.randn(sum(queries), 4, 16), torch.tensor([[2, 0], [3, 1]], dtype=torch.int32)
    batch = build_paged_batch(table.tolist(), queries, lengths, 2 * is_decode, 64, CPU)
    expected = paged_attention(q, keys, values, batch, scale=0.25)
    if is_decode:
        seqlens = torch.tensor(lengths, dtype=torch.int32)
        options = {"cache_seqlens": seqlens, "softmax_scale": 0.25, "causal": True, "block_table": table}
        found = stand_ins.decode_attention(q.unsqueeze(1), keys, values, **options).squeeze(1)
    else:
        ends = torch.tensor([0, 70, 75], dtype=torch.int32)
        options = {"softmax_scale": 0.25, "causal": True, "block_table": table}
        found = stand_ins.varlen_attention(q, keys, values, ends, ends, 70, 70, **options)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_the_peer_gets_no_package_of_ours_that_is_not_there():
    """The peer's process has neither rich nor megatron-core 0.16.1: the test lists the modules that it imports."""
    program = (
        "import sys; sys.modules.update(rich=None); "
        "import benchmarks.gpu.notes, benchmarks.gpu.work, benchmarks.gpu.megatron_0_19.stand_ins; "
        "print([name for name in sys.modules if name.startswith(('megatron.', 'megatron_ext'))])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.kernels
@pytest.mark.skipif(PEER is None, reason="MEGATRON_0_19 names no folder with megatron-core 0.19.2")
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_the_peer_runs(graphs, tmp_path):
    """The peer's engine runs by the calls of ours, interpreted on a CPU: prefix caching, decode, both schedules."""
    shape = {
        **shapes.SMALL.to_dict(),
        **{"hybrid_override_pattern": "M*-", "hidden_size": 64, "ffn_hidden_size": 128, "kv_channels": 16},
        **{"mamba_state_dim": 16, "mamba_head_dim": 16, "mamba_num_heads": 2, "mamba_num_groups": 1, "vocab_size": 128},
    }
    todo = work.Work("float32", (256,), (1,), (2,), 1, 128)
    figures = tmp_path / "figures.json"
    work.RequestSpec(shape, todo, "float32", 900.0, str(figures), graphs, graph_tokens=16).write(tmp_path / "job.json")
    script = ROOT / "tests" / "unit_tests" / "support" / "peer_on_cpu.py"
    environment = {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(Path(PEER or "").resolve()), str(ROOT)])}
    command = [sys.executable, "-O", str(script), str(tmp_path / "job.json")]
    ended = processes.run(command, figures, 900.0, environment)
    assert ended["failed"] == [], json.dumps(ended, indent=1)
    found = ended["found"]
    how = "graphs" if graphs else "eager"
    assert found["version"] == "0.19.2"
    assert found["prompt tokens that its cache saved"] >= 256
    assert "256 tokens, 1 at once, cold over warm" in found
    assert found[f"2 decode, {how}, tokens/s"] > 0
    assert found[f"2 decode, {how}, async schedule, tokens/s"] > 0


def test_what_the_peer_needs_can_be_named():
    """The stand-ins name existing modules; a mistyped name would only fail on the GPU machine."""
    assert isinstance(stand_ins.flash_attention_stand_in(), ModuleType)
    assert importlib.util.find_spec("benchmarks.gpu.megatron_0_19.__main__") is not None
