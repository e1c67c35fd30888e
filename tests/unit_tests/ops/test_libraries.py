"""CU-15, CU-16: libraries are refused by name where they cannot be used, before anything is allocated."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from packaging.requirements import Requirement

from megatron_ext.config.batching import OPERATOR_BACKENDS, BatchingConfig
from megatron_ext.errors import ConfigError
from megatron_ext.mcore.layers.layer_map import operator_shapes
from megatron_ext.ops import backend_selection, libraries, triton
from megatron_ext.ops.libraries import FLASHINFER, LIBRARIES, MAMBA_SSM, OperatorShapes
from tests.unit_tests.ops.library_stand_ins import install
from tests.unit_tests.support.source import ROOT

CUDA = torch.device("cuda")
BF16, FP32 = torch.bfloat16, torch.float32
FITS = OperatorShapes(dtype=BF16, head_channels=128, conv_window=4, conv_dtype=BF16)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """All packages are there, and kernels run."""
    monkeypatch.setattr(triton, "problem", lambda device: None)
    for library in LIBRARIES.values():
        for package in library.packages:
            install(monkeypatch, package, object())


@pytest.mark.parametrize("wanted", LIBRARIES)
def test_a_model_that_fits(installed, wanted: str) -> None:
    backend_selection.check(wanted, CUDA, FITS)


@pytest.mark.parametrize(
    ("wanted", "changed", "message"),
    [
        (MAMBA_SSM, {"conv_window": None}, "it computes recurrent layers, and the model has none"),
        (MAMBA_SSM, {"conv_window": 5}, r"windows of 2, 3 or 4, and the model's have 5"),
        (MAMBA_SSM, {"conv_dtype": FP32}, r"they are torch.float32; leave out --mamba-inference-conv-states-dtype"),
        (FLASHINFER, {"head_channels": None}, "it computes attention, and the model has none"),
        (FLASHINFER, {"dtype": FP32}, r"16 bits, and the model is in torch.float32; give --bf16 or --fp16"),
        (FLASHINFER, {"head_channels": 80}, r"heads of 64, 128 or 256 channels, and the model's have 80"),
        (FLASHINFER, {"has_sinks": True}, "without attention sinks, and the model has them"),
        (FLASHINFER, {"is_captured": True}, "leave out --cuda-graph-impl"),
    ],
)
def test_a_model_that_does_not_fit(installed, wanted: str, changed: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"--operator-backend {wanted}: .*{message}; auto and reference work here"):
        backend_selection.check(wanted, CUDA, replace(FITS, **changed))


@pytest.mark.parametrize("wanted", LIBRARIES)
def test_a_stage_without_such_layers(installed, wanted: str) -> None:
    backend_selection.check(wanted, CUDA, OperatorShapes(dtype=BF16, is_whole=False))


@pytest.mark.parametrize("wanted", LIBRARIES)
def test_on_a_cpu(installed, wanted: str) -> None:
    message = rf"--operator-backend {wanted}: its kernels run on CUDA devices, and the model is on cpu; auto and"
    with pytest.raises(ConfigError, match=message):
        backend_selection.check(wanted, torch.device("cpu"), FITS)


@pytest.mark.parametrize(
    ("wanted", "package"), [(name, one) for name, library in LIBRARIES.items() for one in library.packages]
)
class TestPackages:
    """Packages that are missing, too old or broken."""

    def test_not_installed(self, installed, monkeypatch, wanted: str, package: libraries.Package) -> None:
        def missing(name: str) -> str:
            raise libraries.importlib.metadata.PackageNotFoundError(name)

        monkeypatch.setattr(libraries.importlib.metadata, "version", missing)
        with pytest.raises(ConfigError, match=rf"{wanted}: .* is not installed \(pip install .*\); auto and"):
            backend_selection.check(wanted, CUDA, FITS)

    @pytest.mark.parametrize("version", ["0.1", "99.0"])
    def test_another_version(self, installed, monkeypatch, wanted: str, package: libraries.Package, version) -> None:
        install(monkeypatch, package, object(), version)
        message = rf"{package.distribution} {version} is installed, and only {package.versions} is supported; auto and"
        with pytest.raises(ConfigError, match=message):
            backend_selection.check(wanted, CUDA, FITS)

    def test_it_cannot_be_imported(self, installed, monkeypatch, wanted: str, package: libraries.Package) -> None:
        def broken(name: str) -> object:
            raise ImportError("undefined symbol")

        monkeypatch.setattr(libraries.importlib, "import_module", broken)
        with pytest.raises(ConfigError, match=r"cannot be imported \(undefined symbol\); auto and reference work here"):
            backend_selection.check(wanted, CUDA, FITS)

    def test_its_versions_are_those_of_the_project(self, wanted: str, package: libraries.Package) -> None:
        (extra,) = re.findall(r"^cuda = \[\n(.*?)^\]$", (ROOT / "pyproject.toml").read_text("utf-8"), re.M | re.S)
        listed = [Requirement(one) for one in re.findall(r'"(.*?)"', extra)]
        assert Requirement(package.distribution + package.versions) in listed


@pytest.mark.parametrize("backends", backend_selection.OPERATORS, ids=lambda backends: backends.operator)
def test_no_library_is_chosen_by_default(backends, installed) -> None:
    for wanted in set(LIBRARIES) & set(backends.names):
        with backends.forced(wanted):
            backend = backends.choose(torch.empty(1))
        for x in (torch.empty(1), torch.empty(1, device="meta"), torch.empty(1, dtype=BF16)):
            assert not backend.takes(x)


def test_each_library_is_a_choice() -> None:
    assert set(LIBRARIES) < set(OPERATOR_BACKENDS)
    computed = {name for backends in backend_selection.OPERATORS for name in backends.names}
    assert computed >= set(LIBRARIES)


@pytest.mark.parametrize(("kind", "window"), [("hybrid", 4), ("mamba1_only", 3), ("attention_only", None)])
def test_shapes_of_a_model(get_oracle, kind: str, window: int | None) -> None:
    """Checks see the shapes that the engine of the model has."""
    model = get_oracle(kind).model
    shapes = operator_shapes(model, BatchingConfig(conv_states_dtype="bf16", cuda_graph_impl="local"), FP32)
    assert shapes.dtype == FP32
    assert (shapes.head_channels is None) == (kind == "mamba1_only")
    assert (shapes.conv_window, shapes.conv_dtype) == (window, BF16 if window else None)
    assert (shapes.has_sinks, shapes.is_captured, shapes.is_whole) == (False, True, True)
