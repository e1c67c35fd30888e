"""SC-10: the C++ operators' library, compiled once however many ask, and what holds where it cannot be."""

from __future__ import annotations

import ctypes
import functools
import os
import shlex
import shutil
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from megatron_ext.errors import ConfigError
from megatron_ext.ops import cpp
from megatron_ext.ops.causal_conv1d import CAUSAL_CONV1D
from megatron_ext.ops.cpp import library_build
from megatron_ext.ops.cpp.library_build import BuildCache, BuildError, compile_library, open_library
from tests.forked import fork
from tests.unit_tests.support.foreign import ForeignFiles
from tests.unit_tests.support.source import PACKAGE

needs_compiler = pytest.mark.skipif(not cpp.can_be_built(), reason="there is no C++ compiler")


class FakeCompiler:
    """A script in the compiler's place: notes how it was called, and writes what `-o` names."""

    def __init__(self, folder: Path, then: str = "true", version: str = "fake 1") -> None:
        self.calls, self.path = folder / "calls", folder / "cxx"
        script = f"""#!/bin/sh
case " $* " in *" --version "*) echo "{version}"; exit 0;; esac
echo call >> "{self.calls}"
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
        monkeypatch.setenv("CXX", shlex.quote(str(made.path)))
        return made

    return make


CALLS = 2  # the compiler and the linker


def die_with_the_lock(folder: Path, key: str) -> None:
    """Be killed in the middle of a build."""
    with BuildCache(folder) as cache, cache.lock(print), cache.build(key) as work:
        (work / "operators.so").touch()
        os.kill(os.getpid(), signal.SIGKILL)


def library_file(say) -> Path:
    """Path of the library, found or built; it is not kept open."""
    library = open_library(say)
    library.close()
    return library.path


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
        assert sorted(path.name for path in cache.iterdir()) == [first.parent.name, "lock"]
        assert [path.name for path in first.parent.iterdir()] == ["operators.so"]

    def test_however_many_ask_at_once(self, cache, fake):
        compiler = fake("sleep 0.05")
        with ThreadPoolExecutor(8) as pool:
            found = set(pool.map(lambda _: library_file(lambda line: None), range(8)))
        assert len(found) == 1
        assert compiler.count() == CALLS

    def test_the_lock_dies_with_its_process(self, cache, fake):
        compiler = fake()
        key = library_build.build_key(library_build.toolchain())
        holder = fork(die_with_the_lock, cache, key)
        holder.join()
        assert holder.exitcode == -signal.SIGKILL
        assert (cache / "building" / "operators.so").exists()
        assert library_file(lambda line: None).read_text() == "made\n"
        assert compiler.count() == CALLS
        assert not (cache / "building").exists()

    def test_a_folder_without_its_library_is_replaced(self, cache, fake):
        """TE-5: a removal that was interrupted leaves one; each start would compile again, and fail."""
        compiler = fake()
        left = library_file(lambda line: None)
        left.unlink()
        (left.parent / "left").touch()
        assert library_file(lambda line: None) == left
        assert compiler.count() == 2 * CALLS
        assert library_file(pytest.fail) == left


def copy_sources(folder: Path) -> Path:
    """Copy the package's C++ sources below another folder."""
    shutil.copytree(PACKAGE / "ops", folder / "ops", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    return folder / "ops"


class TestKept:
    """TE-5: the builds used last."""

    @pytest.fixture
    def build_version(self, cache, fake, monkeypatch):
        """Build for a compiler of this version, used at that second; opened, not loaded."""
        monkeypatch.setattr(library_build, "MAX_BUILDS", 4)

        def make(version: int) -> library_build.Library:
            fake(version=f"fake {version}")
            library = open_library(lambda line: None)
            os.utime(library.path.parent, (version, version))
            return library

        return make

    @staticmethod
    def kept(cache: Path) -> set[float]:
        return {path.parent.stat().st_mtime for path in cache.glob("*/operators.so")}

    def test_the_last_ones(self, cache, build_version):
        for version in range(7):
            build_version(version).close()
        assert self.kept(cache) == {3, 4, 5, 6}
        assert len(list(cache.iterdir())) == 4 + len(["lock"])


class TestKey:
    """TE-5: another source, compiler, flag, CPU or torch is another build; another folder is not."""

    @pytest.fixture
    def copied(self, tmp_path, monkeypatch) -> Path:
        monkeypatch.setattr(library_build, "OPS", copy_sources(tmp_path))
        return library_build.OPS

    def test_each_part_counts(self, copied, fake, monkeypatch):
        def key() -> str:
            return library_build.build_key(library_build.toolchain())

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
        for name, value in (("_FLAGS", f"{library_build._FLAGS} -g0"), ("_LINKED", ())):
            monkeypatch.setattr(library_build, name, value)
            keys.append(key())
        monkeypatch.setenv("CXX", f"{os.environ['CXX']} -O1")
        keys.append(key())
        assert len(set(keys)) == len(keys)


class TestWithout:
    """Missing library: the reference computes, and a warning appears once."""

    def test_no_compiler(self, cache, monkeypatch, capsys):
        monkeypatch.setenv("CXX", "/nowhere/c++")
        assert not cpp.can_be_built()
        self.assert_the_reference_computes(monkeypatch)
        said = capsys.readouterr().err
        assert said.splitlines() == [
            "megatron_ext: operators run in plain torch, which is slower, because CXX=/nowhere/c++ does not exist; "
            "install one, or set CXX to one"
        ]

    def test_a_build_that_fails(self, cache, fake, monkeypatch, capsys):
        compiler = fake("echo what is wrong; false")
        self.assert_the_reference_computes(monkeypatch)
        lines = capsys.readouterr().err.splitlines()
        log = next(cache.glob("*.log"))
        assert len(lines) == 2
        assert lines[1].endswith(f"slower, because the operators could not be compiled, see {log}")
        assert "what is wrong\n" in log.read_text()
        calls = compiler.count()
        with pytest.raises(BuildError, match=f"failed before, see {log}; delete that file to try again"):
            library_file(pytest.fail)
        assert compiler.count() == calls
        log.unlink()
        with pytest.raises(BuildError, match="could not be compiled"):
            library_file(lambda line: None)
        assert compiler.count() > calls
        assert not (cache / "building").exists()

    def test_a_cache_that_others_may_write(self, cache, fake):
        fake()
        cache.mkdir(parents=True)
        cache.chmod(0o777)
        with pytest.raises(BuildError, match=f"^{cache}: other users can write to the directory .mode 0777"):
            library_file(pytest.fail)

    def test_another_users_library(self, cache, fake, monkeypatch, capsys):
        """SE-7."""
        fake()
        path = library_file(lambda line: None)
        ForeignFiles(monkeypatch).add(path)
        self.assert_the_reference_computes(monkeypatch)
        assert f"slower, because {path}: the file belongs to another user" in capsys.readouterr().err

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
        with pytest.raises(ConfigError, match="MEGATRON_EXT_CPP=required: CXX=/nowhere/c\\+\\+ does not exist"):
            cpp.are_used()


@needs_compiler
class TestSmallLibrary:
    """Library of a few lines, built by the real compiler."""

    @pytest.fixture
    def compiled(self, tmp_path, cache, monkeypatch):
        """Compile one source, that lies in a folder of this name."""

        def make(name: str, text: str) -> library_build.Library:
            source = tmp_path / name / "ops" / "one" / "kernels.cpp"
            source.parent.mkdir(parents=True)
            source.write_text(text)
            monkeypatch.setattr(library_build, "OPS", source.parents[1])
            monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name / "cache"))
            return open_library(lambda line: None)

        return make

    def test_no_path_gets_into_it(self, tmp_path, compiled):
        """TE-5: the library shared by two checkouts contains no path of the one that compiled it."""
        text = """#include <c10/util/Exception.h>
extern "C" const char* place(int x) { TORCH_CHECK(x); TORCH_INTERNAL_ASSERT(x > 1, "no"); return __FILE__; }
"""
        libraries = [compiled(name, text) for name in ("one", "two")]
        one, two = (library.path.read_bytes() for library in libraries)
        assert one == two
        assert b"megatron_ext/ops/one/kernels.cpp" in one
        for path in (tmp_path, Path(torch.__file__).parent):
            assert str(path).encode() not in one
        for library in libraries:
            library.close()

    def test_the_checked_file_is_the_loaded_one(self, compiled):
        """SE-7: another file in its place after it was opened changes nothing."""
        libraries = [compiled(name, f'extern "C" int number() {{ return {name}; }}\n') for name in ("1", "2")]
        os.replace(libraries[1].path, libraries[0].path)
        libraries[0].load()
        handle = libraries[0].handle
        assert ctypes.CDLL(f"/proc/self/fd/{handle}").number() == 1
        mapped = {line.split()[4] for line in Path("/proc/self/maps").read_text().splitlines()}
        assert str(os.fstat(handle).st_ino) in mapped
        libraries[1].close()


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


def is_gone(pid: int) -> bool:
    """Ended, though perhaps not waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_an_interrupt_ends_the_compiler(tmp_path, monkeypatch):
    """Interrupted while it runs: it and what it has started are ended."""
    script, started = tmp_path / "slow", tmp_path / "started"
    script.write_text(f"#!/bin/sh\nsleep 600 &\necho $! $$ > '{started}.part'\nmv '{started}.part' '{started}'\nwait\n")
    script.chmod(0o755)

    def interrupted(*_: object, **__: object) -> None:
        while not started.exists():
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "communicate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        compile_library([str(script)], [tmp_path / "x.cpp"], tmp_path)
    pids = [int(pid) for pid in started.read_text().split()]
    while not all(is_gone(pid) for pid in pids):  # for ever, if they were not ended
        time.sleep(0.01)
