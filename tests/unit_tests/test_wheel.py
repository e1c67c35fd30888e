"""PY-9: the wheel alone, in an environment without a checkout: commands, data files, the server."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from megatron_ext.commands.main import COMMANDS
from tests.unit_tests.support.source import PACKAGE, ROOT

pytestmark = pytest.mark.long
DOCUMENTS = ("CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "SECURITY.md", "constraints.txt", "lock.txt", "docs")
PARTS = ("megatron_ext", "arguments", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in", *DOCUMENTS)
BUILD = "import sys; from setuptools import build_meta as b; to = sys.argv[1]; b.build_sdist(to); b.build_wheel(to)"
BESIDE = {"PYTHONPATH", "PYTHONHOME"}  # variables by which a checkout would be found


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with an sdist and a wheel, built from a copy of the sources."""
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("built")
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, source / part, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / part, source)
    done = subprocess.run([sys.executable, "-c", BUILD, str(folder)], cwd=source, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return folder


@pytest.fixture(scope="module")
def scripts(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of console scripts of a new environment: the wheel, and the packages that this one has."""
    place = tmp_path_factory.mktemp("environment")
    venv.create(place, with_pip=False)
    python = place / "bin" / "python"
    (wheel,) = built.glob("*.whl")
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)]
    done = subprocess.run(install, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    own = sysconfig.get_path("purelib", vars={"base": str(place), "platbase": str(place)})
    packages = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (Path(own) / "packages.pth").write_text("\n".join(packages) + "\n")  # their .pth files, ours too, are not read
    return place / "bin"


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Variables of a process whose working directory is empty."""
    monkeypatch.chdir(tmp_path)
    return {name: value for name, value in os.environ.items() if name not in BESIDE} | {"OMP_NUM_THREADS": "1"}


def run(environment: dict[str, str], *command: object) -> str:
    done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def server(scripts: Path, environment: dict[str, str]) -> Iterator[str]:
    """URL of `megatron-ext serve`, which ends in order."""
    command = [str(scripts / "megatron-ext"), "serve", "--port", "0"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield next(line.split()[1] for line in process.stdout if line.startswith("ready: "))
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()


def test_the_sdist_has_the_sources_and_no_tests(built: Path):
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "LICENSE", "megatron_ext/models/embedded_model/config.json", *DOCUMENTS} <= names
    ours = {str(path.relative_to(ROOT)) for path in PACKAGE.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    assert ours <= names
    assert not [name for name in names if name.startswith("tests")]


def test_the_wheel_has_the_licence_and_its_types(built: Path):
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name.partition(".dist-info/")[2] or name for name in archive.namelist()}
    assert {"licenses/LICENSE", "entry_points.txt", "megatron_ext/py.typed"} <= names
    assert not [name for name in names if name.startswith(("docs", "tests"))]


def test_the_main_job(scripts: Path, environment: dict[str, str], tmp_path: Path):
    """The embedded model on the shipped prompts, with the code of the wheel."""
    place = run(environment, scripts / "python", "-c", "import megatron_ext; print(megatron_ext.__file__)")
    assert Path(place).is_relative_to(scripts.parent)
    output = tmp_path / "out.json"
    shown = run(environment, scripts / "megatron-ext", "run", "--num-tokens-to-generate", "4", "--output-path", output)
    assert "tokens generated" in shown
    assert json.loads(output.read_text())["0"]["status"] == "COMPLETED"


def test_the_server(server: str):
    """A completion, from another process."""
    body = {"model": "embedded", "prompt": "The import statement", "max_tokens": 3, "temperature": 0}
    assert httpx.post(f"{server}/v1/completions", json=body, timeout=60).json()["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_each_command_is_there(command: str, scripts: Path, environment: dict[str, str]):
    shown = run(environment, scripts / "megatron-ext", command, "--help")
    assert shown.startswith(f"usage: megatron-ext {command} ")
