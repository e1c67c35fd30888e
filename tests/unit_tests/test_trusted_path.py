"""SE-7: paths that other users can have a hand in are refused, whatever they rename meanwhile."""

from __future__ import annotations

import os
import stat
from contextlib import closing
from pathlib import Path

import pytest

from megatron_ext import trusted_path
from megatron_ext.ops.cpp.library_build import BuildCache
from megatron_ext.trusted_path import UntrustedPathError, open_directory, open_file
from tests.unit_tests.support.foreign import OTHER_USER, ForeignFiles

KEY = "0123456789abcdef"


@pytest.fixture
def foreign(monkeypatch) -> ForeignFiles:
    return ForeignFiles(monkeypatch)


class Opened:
    """The handle of a directory and of a file in it, closed at the end."""

    def __init__(self, directory: Path, file: str) -> None:
        self._directory = open_directory(directory)
        try:
            self.handle = open_file(self._directory, file)
        except BaseException:
            os.close(self._directory)
            raise

    def close(self) -> None:
        os.close(self.handle)
        os.close(self._directory)


def content(directory: Path, file: str = "file") -> bytes:
    with closing(Opened(directory, file)) as opened:
        return os.read(opened.handle, 100)


@pytest.fixture
def place(tmp_path) -> Path:
    """A directory with a file, two levels below `tmp_path`."""
    made = tmp_path / "above" / "place"
    made.mkdir(parents=True, mode=0o755)
    (made / "file").write_bytes(b"ours")
    (made / "file").chmod(0o644)
    return made


class TestTrusted:
    def test_directories_of_this_user(self, place):
        assert content(place) == b"ours"

    @pytest.mark.parametrize("target", ["above", "{}/above", "x/../above", "./above/", "other"])
    def test_links_of_this_user(self, tmp_path, place, target):
        (tmp_path / "x").mkdir()
        (tmp_path / "other").symlink_to("x/../above/../above")
        (tmp_path / "link").symlink_to(target.format(tmp_path))
        assert content(tmp_path / "link" / "place") == b"ours"

    def test_a_link_at_the_end(self, tmp_path, place):
        (tmp_path / "link").symlink_to(place)
        (place / "other").symlink_to("file")
        assert content(tmp_path / "link", "other") == b"ours"

    def test_a_sticky_directory_on_the_way(self, tmp_path, place):
        (tmp_path / "above").chmod(0o1777)
        assert content(place) == b"ours"

    def test_missing_parts_are_created_for_this_user_alone(self, tmp_path):
        (tmp_path / "link").symlink_to("missing")
        before = os.umask(0)
        try:
            os.close(open_directory(tmp_path / "link" / "a" / "b"))
        finally:
            os.umask(before)
        for part in ("missing", "missing/a", "missing/a/b"):
            assert stat.S_IMODE((tmp_path / part).stat().st_mode) == 0o700


class TestUntrusted:
    @pytest.mark.parametrize("part", ["", "above", "above/place", "above/place/file"])
    def test_of_another_user(self, tmp_path, place, foreign, part):
        foreign.add(tmp_path / part)
        with pytest.raises(UntrustedPathError, match=f"belongs to another user .uid {OTHER_USER}.; chown it") as caught:
            content(place)
        assert str(caught.value).startswith(f"{tmp_path / part}: ")
        assert "name another directory" in str(caught.value)

    def test_a_link_of_another_user_to_a_directory_of_this_one(self, tmp_path, place, foreign):
        (tmp_path / "link").symlink_to("above")
        foreign.add(tmp_path / "link")
        with pytest.raises(UntrustedPathError, match=f"^{tmp_path}/link: the link belongs to another user"):
            content(tmp_path / "link" / "place")

    @pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
    @pytest.mark.parametrize("part", ["above", "above/place", "above/place/file"])
    def test_that_others_can_write_to(self, tmp_path, place, part, mode):
        (tmp_path / part).chmod(mode)
        with pytest.raises(
            UntrustedPathError, match=f"mode {mode:04o}.; chmod go-w it, or name another directory"
        ) as caught:
            content(place)
        assert str(caught.value).startswith(f"{tmp_path / part}: other users can write to")

    def test_sticky_at_the_end(self, place):
        place.chmod(0o1777)
        with pytest.raises(UntrustedPathError, match=r"other users can write to the directory .mode 1777"):
            content(place)

    def test_an_entry_of_another_user_in_a_sticky_directory(self, tmp_path, place, foreign):
        (tmp_path / "above").chmod(0o1777)
        foreign.add(place)
        with pytest.raises(UntrustedPathError, match=f"^{place}: the directory belongs to another user"):
            content(place)

    def test_a_file_that_is_not_regular(self, place):
        os.mkfifo(place / "pipe", 0o600)
        for name in ("pipe", "."):
            with pytest.raises(UntrustedPathError, match="is not a regular file"):
                content(place, name)


class TestErrors:
    def test_no_handle_is_left_open(self, tmp_path, place, foreign):
        (place / "loop").symlink_to("loop")
        (tmp_path / "link").symlink_to(place)
        content(tmp_path / "link")
        for name in ("missing", "loop", "."):
            with pytest.raises((OSError, UntrustedPathError)):
                content(tmp_path / "link", name)
        foreign.add(tmp_path / "link")
        with pytest.raises(UntrustedPathError):
            content(tmp_path / "link")
        links = [Path("/proc/self/fd", number) for number in os.listdir("/proc/self/fd")]
        opened = [os.readlink(link) for link in links if os.path.lexists(link)]
        assert [path for path in opened if path.startswith(str(tmp_path))] == []


class Swapped:
    """A link that leads to a cache of this user or to one of another user, which looks the same; either has a build."""

    def __init__(self, folder: Path, foreign: ForeignFiles) -> None:
        self.path, self._next = folder / "cache", folder / "next"
        self._targets = [folder / "ours", folder / "theirs"]
        for target in self._targets:
            file = target / "megatron_ext" / "operators" / KEY / "operators.so"
            file.parent.mkdir(parents=True)
            file.write_text(target.name)
        for path in (self._targets[1], *self._targets[1].rglob("*")):
            foreign.add(path)
        self.swap()

    def swap(self) -> None:
        """Let it lead to the other one, at once."""
        self._next.symlink_to(self._targets[0])
        self._targets.reverse()
        self._next.rename(self.path)

    def look_up(self, foreign: ForeignFiles) -> str | None:
        """The content of the build that is found; None if the path was refused."""
        try:
            with BuildCache(self.path / "megatron_ext" / "operators") as cache:
                library = cache.find(KEY)
        except UntrustedPathError:
            return None
        assert library is not None
        try:
            assert not foreign.has(library.handle)
            return os.read(library.handle, 100).decode()
        finally:
            library.close()


class CountedOs:
    """The module `os`, with something done before one of its calls."""

    def __init__(self, act, when: int) -> None:
        self._act, self._left = act, when

    def __getattr__(self, name: str) -> object:
        found = getattr(os, name)
        if not callable(found):
            return found

        def call(*args: object, **kwargs: object) -> object:
            if self._left == 0:
                self._act()
            self._left -= 1
            return found(*args, **kwargs)

        return call

    @property
    def is_done(self) -> bool:
        return self._left < 0


class TestRenamedMeanwhile:
    def test_before_every_call(self, tmp_path, foreign, monkeypatch):
        """Another user's cache in the place of ours, and the other way round, before each call of the system."""
        swapped = Swapped(tmp_path, foreign)
        found, when, was_done = [], 0, True
        while was_done:
            with monkeypatch.context() as patch:
                counted = CountedOs(swapped.swap, when)
                patch.setattr(trusted_path, "os", counted)
                found.append(swapped.look_up(foreign))
            was_done, when = counted.is_done, when + 1
        assert set(found) == {"ours", None}
