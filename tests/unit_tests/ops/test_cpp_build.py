"""SC-10: the C++ operators' library, compiled once however many ask, and what holds where it cannot be."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from megatron_ext.errors import ConfigError
from megatron_ext.ops import cpp
from megatron_ext.ops.causal_conv1d import CAUSAL_CONV1D
from megatron_ext.ops.cpp import build, compilation
from megatron_ext.ops.cpp.build import BuildError, library_file
from megatron_ext.ops.cpp.compilation import CompileError, compile_library
from tests.unit_tests.support.source import PACKAGE, ROOT

needs_compiler = pytest.mark.skipif(not cpp.can_be_built(), reason="there is no C++ compiler")


class FakeCompiler:
    """A script in the compiler's place: notes how it was called, and writes what `-o` names."""

    def __init__(self, folder: Path, then: str = "true", version: str = "fake 1") -> None:
        self.calls, self.path = folder / "calls", folder / "cxx"
        script = f"""#!/bin/sh
[ "$1" = --version ] && {{ echo "{version}"; exit 0; }}
echo call >> {self.calls}
{then} || exit 3
while [ "$1" != -o ]; do shift; done
echo made > "$2"
"""
        self.path.write_text(script)
        self.path.chmod(0o755)

    def count(self) -> int:
        return len(self.calls.read_text().splitlines()) if self.calls.exists() else 0


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache, and nothing settled in this process before or after."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(cpp.SWITCH, raising=False)
    monkeypatch.setattr(cpp, "_problem", cpp._problem.__wrapped__)
    monkeypatch.setattr(cpp, "_choose", cpp._choose.__wrapped__)
    monkeypatch.setattr(cpp, "are_used", cpp.are_used.__wrapped__)
    return tmp_path / "cache" / "megatron_ext" / "operators"


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Make a compiler, and let it be the one that is found."""

    def make(*args: str, **kwargs: str) -> FakeCompiler:
        made = FakeCompiler(tmp_path, *args, **kwargs)
        monkeypatch.setenv("CXX", str(made.path))
        return made

    return make


CALLS = 2  # the compiler and the linker


class TestOnce:
    def test_the_second_time_it_is_there(self, cache, fake):
        compiler, said = fake(), []
        first = library_file(said.append)
        assert first.read_text() == "made\n"
        assert compiler.count() == CALLS
        assert [line.split(" ")[0] for line in said] == ["compiling", "compiled"]
        assert library_file(said.append) == first
        assert compiler.count() == CALLS
        assert len(said) == 2
        assert sorted(path.name for path in cache.iterdir()) == [first.parent.name, f"{first.parent.name}.lock"]
        assert [path.name for path in first.parent.iterdir()] == ["operators.so"]

    def test_however_many_ask_at_once(self, cache, fake):
        compiler = fake("sleep 0.05")
        with ThreadPoolExecutor(8) as pool:
            found = set(pool.map(lambda _: library_file(lambda line: None), range(8)))
        assert len(found) == 1
        assert compiler.count() == CALLS

    def test_the_lock_dies_with_its_process(self, cache, fake):
        compiler = fake()
        key = build.build_key(build.toolchain())
        code = f"""
import os, signal
from pathlib import Path
from megatron_ext.ops.cpp.build import cache_folder, locked
folder = cache_folder()
with locked(folder / "{key}.lock", print):
    (folder / "{key}.building-half").mkdir()
    (folder / "{key}.building-half" / "operators.so").touch()
    print("held", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
        assert (done.stdout, done.returncode) == ("held\n", -signal.SIGKILL), done.stderr
        assert library_file(lambda line: None).read_text() == "made\n"
        assert compiler.count() == CALLS
        assert not list(cache.glob("*.building-*"))

    def test_the_cache_has_an_end(self, cache, fake):
        for version in range(build._KEPT + 3):
            fake(version=f"fake {version}")
            place = library_file(lambda line: None).parent
            os.utime(place, (version, version))
        kept = {path.parent.stat().st_mtime for path in cache.glob("*/operators.so")}
        assert kept == set(range(3, build._KEPT + 3))


class TestKey:
    """Another source, compiler, flag or torch is another build."""

    @pytest.fixture
    def copied(self, tmp_path, monkeypatch) -> Path:
        shutil.copytree(PACKAGE / "ops", tmp_path / "ops", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
        monkeypatch.setattr(build, "OPS", tmp_path / "ops")
        return tmp_path / "ops"

    def test_each_part_counts(self, copied, fake, monkeypatch):
        def key() -> str:
            return build.build_key(build.toolchain())

        fake()
        keys = [key()]
        assert key() == keys[0]
        for name in ("causal_conv1d/kernels.cpp", "cpp/vectors.h"):
            with (copied / name).open("a") as file:
                file.write("// one line more\n")
            keys.append(key())
        (copied / "cpp/other.h").touch()
        keys.append(key())
        fake(version="fake 2")
        keys.append(key())
        monkeypatch.setattr(torch, "__version__", "0.0")
        keys.append(key())
        another = "AVX512" if torch.backends.cpu.get_cpu_capability() != "AVX512" else "AVX2"
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: another)
        keys.append(key())
        assert len(set(keys)) == len(keys)

    @pytest.mark.parametrize(
        ("capability", "name", "flag"),
        [("AVX512", "AVX512", "-mavx512f"), ("AVX2", "AVX2", "-mfma"), ("?", "DEFAULT", "")],
    )
    def test_flags_follow_what_torch_says_of_the_cpu(self, monkeypatch, capability, name, flag):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
        flags = build._flags()
        assert f"-DCPU_CAPABILITY={name}" in flags
        assert (flag in flags) if flag else not any(one.startswith("-m") for one in flags)


class TestWithout:
    """Where there is no library the reference computes, and that is said once."""

    def test_no_compiler(self, cache, monkeypatch, capsys):
        monkeypatch.setenv("CXX", "/nowhere/c++")
        assert not cpp.can_be_built()
        self.assert_the_reference_computes(monkeypatch)
        said = capsys.readouterr().err
        assert said.splitlines() == [
            "megatron_ext: operators run in plain torch, which is slower: CXX=/nowhere/c++ is not there; with one, "
            "operators are compiled once"
        ]

    def test_a_build_that_fails(self, cache, fake, monkeypatch, capsys):
        compiler = fake("echo what is wrong; false")
        self.assert_the_reference_computes(monkeypatch)
        lines = capsys.readouterr().err.splitlines()
        log = next(cache.glob("*.log"))
        assert len(lines) == 2
        assert lines[1].endswith(f"slower: the operators could not be compiled, see {log}")
        assert "what is wrong\n" in log.read_text()
        calls = compiler.count()
        with pytest.raises(BuildError, match=f"has failed before, see {log}; without that file it is tried again"):
            library_file(pytest.fail)
        assert compiler.count() == calls
        log.unlink()
        with pytest.raises(BuildError, match="could not be compiled"):
            library_file(lambda line: None)
        assert compiler.count() > calls
        assert not list(cache.glob("*.building-*"))

    def test_a_library_that_cannot_be_loaded(self, cache, fake, monkeypatch, capsys):
        fake()
        self.assert_the_reference_computes(monkeypatch)
        last = capsys.readouterr().err.splitlines()[-1]
        assert last.endswith("file too short); without that file it is compiled again")

    def test_a_cache_that_others_may_write(self, cache, fake):
        fake()
        cache.mkdir(parents=True)
        cache.chmod(0o777)
        with pytest.raises(BuildError, match="not this user's alone to write; XDG_CACHE_HOME names another place"):
            library_file(pytest.fail)

    def test_a_cache_that_cannot_be_written(self, tmp_path, cache, fake, monkeypatch):
        fake()
        (tmp_path / "file").touch()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
        with pytest.raises(BuildError, match="Not a directory; XDG_CACHE_HOME names another place for caches"):
            library_file(pytest.fail)

    def test_the_folder_is_made_for_the_user_alone(self, cache, fake):
        fake()
        library_file(lambda line: None)
        assert stat.S_IMODE(cache.stat().st_mode) == 0o700

    @staticmethod
    def assert_the_reference_computes(monkeypatch) -> None:
        """Twice asked; what is said is said once."""
        monkeypatch.setattr(cpp, "_choose", functools.cache(cpp._choose))
        for _ in range(2):
            assert CAUSAL_CONV1D.backends.choose(torch.zeros(1)).name == "reference"


class TestSwitch:
    def test_off_builds_nothing_and_says_nothing(self, cache, fake, monkeypatch, capsys):
        compiler = fake()
        monkeypatch.setenv(cpp.SWITCH, "off")
        assert not cpp.are_used()
        assert compiler.count() == 0
        assert capsys.readouterr().err == ""

    def test_required_and_not_there(self, cache, monkeypatch):
        monkeypatch.setenv("CXX", "/nowhere/c++")
        monkeypatch.setenv(cpp.SWITCH, "required")
        with pytest.raises(ConfigError, match="MEGATRON_EXT_CPP=required: CXX=/nowhere/c\\+\\+ is not there"):
            cpp.are_used()

    def test_another_value(self, cache, monkeypatch):
        monkeypatch.setenv(cpp.SWITCH, "yes")
        with pytest.raises(ConfigError, match="MEGATRON_EXT_CPP=yes: it is auto, off or required"):
            cpp.are_used()


def is_gone(pid: int) -> bool:
    """Ended, though perhaps not waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_no_compiler_is_left_behind(tmp_path, monkeypatch):
    """Interrupted while it runs: it and what it has started are ended."""
    script, started = tmp_path / "slow", tmp_path / "started"
    script.write_text(f"#!/bin/sh\nsleep 600 &\necho $! $$ > {started}.part\nmv {started}.part {started}\nwait\n")
    script.chmod(0o755)

    def interrupted(*_: object, **__: object) -> None:
        while not started.exists():
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "communicate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        compile_library([str(script)], [tmp_path / "x.cpp"], tmp_path, "library", [])
    pids = [int(pid) for pid in started.read_text().split()]
    deadline = time.monotonic() + 30
    while not all(is_gone(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert all(is_gone(pid) for pid in pids)


def test_a_compiler_that_does_not_end_is_ended(tmp_path, monkeypatch):
    script = tmp_path / "slow"
    script.write_text("#!/bin/sh\nsleep 600\n")
    script.chmod(0o755)
    monkeypatch.setattr(compilation, "_LONGEST_RUN", 0.1)
    with pytest.raises(CompileError, match="still running after 0 s"):
        compile_library([str(script)], [tmp_path / "x.cpp"], tmp_path, "library", [])


@needs_compiler
class TestLibrary:
    """The real one."""

    def test_it_is_compiled_for_what_torch_uses(self):
        name, width = cpp.kernels().vectors().split()
        capability = torch.backends.cpu.get_cpu_capability()
        assert name == (capability if capability in build._VECTOR_FLAGS else "DEFAULT")
        assert int(width) == {"AVX512": 16, "AVX2": 8}.get(name, int(width))

    @pytest.mark.parametrize("count", [1, 2, 3])
    def test_its_threads_are_those_of_torch(self, count):
        before = torch.get_num_threads()
        try:
            torch.set_num_threads(count)
            assert cpp.kernels().threads() == count
        finally:
            torch.set_num_threads(before)

    def test_exp(self):
        x = torch.cat([torch.linspace(-87, 88, 20_001), torch.tensor([0.0, -0.0])])
        want = x.double().exp()
        assert ((cpp.kernels().exp(x) - want).abs() / want).max() < 2e-7
        ends = cpp.kernels().exp(torch.tensor([0.0, -torch.inf, -1e30, torch.nan]))
        assert ends[0] == 1
        assert (ends[1:3] < 2e-38).all()
        assert ends[3].isnan()

    def test_training_is_left_to_the_reference(self):
        x = torch.zeros(1, requires_grad=True)
        assert CAUSAL_CONV1D.backends.choose(x).name == "reference"
        with torch.no_grad():
            assert CAUSAL_CONV1D.backends.choose(x).name == "cpp"
        assert CAUSAL_CONV1D.backends.choose(x.detach().double()).name == "reference"
        assert CAUSAL_CONV1D.backends.choose(torch.zeros(1, device="meta")).name == "reference"


def test_sources_are_part_of_the_package():
    """A wheel has what is compiled on its user's machine."""
    patterns = ROOT.joinpath("pyproject.toml").read_text("utf-8").split('[tool.setuptools.package-data]\n"*" = ', 1)[1]
    for path in [*build.sources(), *build.OPS.glob("*/*.h")]:
        assert f'"*{path.suffix}"' in patterns.splitlines()[0]
        assert (path.parent / "__init__.py").exists()


@pytest.mark.parametrize(
    ("rank", "written"), [(None, "megatron_ext: words\n"), ("0", "megatron_ext: words\n"), ("1", "")]
)
def test_of_several_ranks_the_first_one_speaks(rank, written, monkeypatch, capsys):
    """MR-7."""
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    cpp.say("words")
    assert capsys.readouterr().err == written
