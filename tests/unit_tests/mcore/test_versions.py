"""MF-8: the megatron-core that is found decides the adapter; one that is not supported is refused in one line."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import megatron.core
import pytest

from megatron_ext.errors import ConfigError
from megatron_ext.mcore import versions
from megatron_ext.mcore.upstream_names import UPSTREAM_NAMES
from megatron_ext.mcore.upstream_version import Version, check_supported, found_version
from tests.unit_tests.support.source import ROOT

UNTESTED = versions.VERSION  # as if it were one


def fake_core(folder: Path, package_info: str) -> Path:
    """A megatron-core that says a version and cannot be imported."""
    core = folder / "megatron/core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text("raise SystemError('imported')\n")
    (core / "package_info.py").write_text(package_info)
    return folder


def test_the_version_that_is_found_is_the_imported_one():
    assert megatron.core.__version__.startswith(str(found_version()))
    assert found_version() == versions.VERSION


@pytest.mark.parametrize(
    ("version", "module"),
    [
        ((0, 16, 1), "v0_16"),
        ((0, 16, 2), "v0_16"),
        ((0, 17, 9), "v0_17"),
        ((0, 18, 2), "v0_19"),
        ((0, 19, 1), "v0_19"),
        ((0, 20, 0), "v0_19"),
        ((1, 17, 0), "v0_19"),
    ],
)
def test_supported_versions(version, module):
    """From the oldest tested one on; a series without a module has that of the series before it."""
    check_supported(Version(*version))
    assert versions.module_for(Version(*version)) == f"{versions.__name__}.{module}"


@pytest.mark.parametrize("version", [(0, 15, 3), (0, 16, 0)])
def test_older_versions_are_refused(version):
    with pytest.raises(ConfigError, match=r"^megatron-core \d+\.\d+\.\d+ is not supported: 0\.16\.1 and .*==0\.19\.2$"):
        check_supported(Version(*version))


class TestUntestedVersion:
    """A version that runs after a check."""

    def test_one_warning(self, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.delenv("RANK", raising=False)
        versions.check_names(UNTESTED)
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert f"{UNTESTED} is not tested" in caplog.text
        assert caplog.text.rstrip().endswith("newest tested version is 0.19.2")

    def test_the_names_are_looked_up(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setitem(UPSTREAM_NAMES, "megatron.core.utils", ("_gone",))
        with pytest.raises(ConfigError, match=r"megatron\.core\.utils\._gone"):
            versions.check_names(UNTESTED)


class TestUnsupportedVersion:
    """Processes with a megatron-core that cannot be imported first on the path."""

    @pytest.fixture
    def environment(self, tmp_path: Path) -> dict[str, str]:
        folder = fake_core(tmp_path, "MAJOR = 0\nMINOR = 16\nPATCH = 0\n")
        return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}

    def test_the_package_can_be_imported(self, environment: dict[str, str]):
        code = "import sys, megatron_ext; megatron_ext.load_engine; assert 'torch' not in sys.modules"
        subprocess.run([sys.executable, "-c", code], env=environment, check=True)

    @pytest.mark.parametrize(
        "command",
        [
            pytest.param(["-m", "megatron_ext", "run"], marks=pytest.mark.long),
            ["-c", "import megatron_ext; megatron_ext.load_engine(load='nowhere')"],
        ],
    )
    def test_use_is_refused_in_one_line(self, environment: dict[str, str], command: list[str]):
        done = subprocess.run(
            [sys.executable, *command], env=environment, cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode != 0
        assert "megatron-core 0.16.0 is not supported" in done.stderr.splitlines()[-1]
        assert "imported" not in done.stderr


@pytest.mark.skipif(versions.VERSION < (0, 18), reason="this version has no flag for inference")
class TestInferenceMode:
    """The flag of the process that marks forwards as inference."""

    @pytest.fixture(autouse=True)
    def flag(self):
        from megatron.core.inference.utils import InferenceMode

        assert not InferenceMode.is_active(), "an engine of another test left it"
        yield InferenceMode
        InferenceMode.unset_active()

    def test_it_is_set_during_a_forward_only(self, flag):
        with versions.inference_mode():
            assert flag.is_active()
        assert not flag.is_active()

    def test_it_is_unset_after_an_error(self, flag):
        with pytest.raises(KeyError), versions.inference_mode():
            raise KeyError
        assert not flag.is_active()

    def test_the_last_of_two_threads_unsets_it(self, flag):
        began, may_end = threading.Event(), threading.Event()

        def forward():
            with versions.inference_mode():
                began.set()
                may_end.wait(60)

        thread = threading.Thread(target=forward)
        with versions.inference_mode():
            thread.start()
            assert began.wait(60)
        assert flag.is_active()
        may_end.set()
        thread.join()
        assert not flag.is_active()

    def test_an_engine_leaves_it_for_a_trainer(self, flag, get_driver):
        driver = get_driver()
        assert not flag.is_active()
        driver.add(1, [1, 2, 3], num_tokens_to_generate=2)
        driver.run()
        assert not flag.is_active()
