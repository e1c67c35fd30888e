"""Files of a release: the version, metadata, extras and image agree with the code and with each other."""

from __future__ import annotations

import fnmatch
import json
import re
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

import megatron_ext
from arguments import parse_server_arguments
from arguments.parser import build_parser, build_server_parser
from megatron_ext.commands.main import COMMANDS
from megatron_ext.server.http.auth import OPEN_PATHS
from tests.unit_tests.support.source import ROOT
from tools import pins

CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
RELEASE = re.compile(r"^## \[(\d+\.\d+\.\d+)\] - (\d{4}-\d\d-\d\d)$", re.MULTILINE)
PROJECT = (ROOT / "pyproject.toml").read_text("utf-8")
CONTINUATION = re.compile(r"\\\n\s*")


def section(name: str) -> str:
    """Body of a table of pyproject.toml."""
    return re.search(rf"^\[{re.escape(name)}\].*?\n(.*?)(?=^\[|\Z)", PROJECT, re.MULTILINE | re.DOTALL)[1]


def extras() -> dict[str, list[str]]:
    """Requirements of each extra."""
    text = re.sub(r" *#.*", "", section("project.optional-dependencies"))
    return {
        name: re.findall(r'"([^"]+)"', listed)
        for name, listed in re.findall(r"^(\w+) = \[(.*?)\n?\]$", text, re.M | re.S)
    }


def instructions(text: str) -> list[tuple[str, str]]:
    """Instructions of a Dockerfile with their arguments, continued lines joined."""
    lines = CONTINUATION.sub(" ", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)).splitlines()
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in lines if line.strip()]


def is_sent(name: str, ignore: str) -> bool:
    """Return whether a path below the root is sent to the builder: the last pattern that fits decides."""
    sent = True
    for line in (line for line in ignore.splitlines() if line and not line.startswith("#")):
        pattern = line.removeprefix("!").removeprefix("**/")
        if any(fnmatch.fnmatchcase(part, pattern) for part in (name, name.split("/")[0], name.split("/")[-1])):
            sent = line.startswith("!")
    return sent


class TestVersion:
    """PY-10: one version in every file that states it."""

    def test_the_newest_release_of_the_changelog(self):
        version, date = RELEASE.search((ROOT / "CHANGELOG.md").read_text("utf-8")).groups()
        assert version == megatron_ext.__version__
        assert (CITATION["version"], str(CITATION["date-released"])) == (version, date)

    def test_names_of_wheels_have_it(self):
        named = re.findall(r"megatron_ext-([\d.]+)-py3", (ROOT / "docs/install.md").read_text("utf-8"))
        assert set(named) == {megatron_ext.__version__}

    def test_what_breaks_is_on_one_page(self):
        """The newest release begins with what users of the version before should do; the flags are there."""
        page = (ROOT / "CHANGELOG.md").read_text("utf-8").split("### In short")[1].partition("\n### Added")[0]
        rows = [line for line in page.splitlines() if line.startswith("| ")][1:]
        assert [row for row in rows if row.count(" | ") != 2] == []
        assert len(rows) > 10
        assert len(page.splitlines()) < 80
        parsers = build_parser(), build_server_parser()
        known = {option for parser in parsers for action in parser._actions for option in action.option_strings}
        named = set(re.findall(r"`(--[a-z][\w-]*)", page))
        assert len(named) > 10
        assert sorted(named - known) == []


class TestMetadata:
    """PY-10: what an index shows of the package."""

    def test_classifiers_name_the_pythons_of_the_pins(self):
        named = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PROJECT)
        assert named == pins.pythons()
        assert '"Typing :: Typed"' in PROJECT
        assert (ROOT / "megatron_ext/py.typed").exists()

    def test_the_licence_is_one(self):
        assert 'license = "Apache-2.0"' in PROJECT
        assert CITATION["license"] == "Apache-2.0"
        assert "Apache License" in (ROOT / "LICENSE").read_text("utf-8")

    @pytest.mark.parametrize("extra", sorted(set(extras()) - {"cuda", "ray"}))
    def test_each_extra_has_pins(self, extra):
        """A set-up with the constraints file resolves every extra; those of `cuda` depend on the machine's CUDA."""
        pinned = {pin.name for pin in pins.read_pins()}
        assert {Requirement(one).name for one in extras()[extra]} <= pinned


class TestImage:
    """PY-11: the Dockerfile names files, commands, flags and routes that are there, and its server is not root's."""

    TEXT = (ROOT / "Dockerfile").read_text("utf-8")
    STEPS = instructions(TEXT)

    def arguments(self, name: str) -> list[str]:
        return [value for one, value in self.STEPS if one == name]

    def test_files_are_there_and_sent(self):
        ignore = (ROOT / ".dockerignore").read_text("utf-8")
        copies = [value.split()[:-1] for value in self.arguments("COPY") if not value.startswith("--from")]
        names = [name for copied in copies for name in copied]
        assert len(names) > 4
        assert [name for name in names if not (ROOT / name).exists() or not is_sent(name, ignore)] == []
        assert not is_sent("out/secret", ignore)
        assert not is_sent(".git", ignore)
        assert not is_sent("megatron_ext/__pycache__", ignore)

    def test_the_wheel_is_built_of_all_that_it_needs(self):
        copied = {name for value in self.arguments("COPY") for name in value.split()[:-1]}
        packages = re.findall(r'"(\w+)\*"', section("tool.setuptools.packages.find"))
        assert {*packages, "pyproject.toml", "README.md", "LICENSE"} <= copied

    def test_the_server_is_not_roots(self):
        names = [name for name, _ in self.STEPS]
        (user,) = self.arguments("USER")
        assert int(user.partition(":")[0]) > 0, "orchestrators can tell a number from root, not a name"
        assert f"--uid {user.partition(':')[0]} " in self.TEXT
        assert names.index("USER") < names.index("ENTRYPOINT")
        assert "RUN" not in names[names.index("USER") :]

    def test_the_command_is_there(self):
        (entry,), command = (json.loads(self.arguments(name)[0]) for name in ("ENTRYPOINT", "CMD"))
        assert f"{entry} = " in section("project.scripts")
        assert command[0] in COMMANDS
        server = parse_server_arguments(command[1:]).server
        assert [str(server.port)] == self.arguments("EXPOSE")
        (check,) = self.arguments("HEALTHCHECK")
        port, path = re.search(r"http://127\.0\.0\.1:(\d+)(/\w+)", check).groups()
        assert (int(port), path in OPEN_PATHS) == (server.port, True)

    def test_versions_are_those_of_the_pins(self):
        assert f"torch=={next(str(pin.specifier)[2:] for pin in pins.read_pins() if pin.name == 'torch')}" in self.TEXT
        bases = {value.split()[0] for value in self.arguments("FROM")}
        assert {re.match(r"python:(3\.\d+)-", base)[1] for base in bases} <= set(pins.pythons())
        assert set(re.search(r"\}\[([\w,]+)\]", self.TEXT)[1].split(",")) <= set(extras())


def test_the_parts_of_a_source_distribution_are_there():
    """PY-9: files that MANIFEST.in names; setuptools only warns of a missing one."""
    lines = [line.split() for line in (ROOT / "MANIFEST.in").read_text("utf-8").splitlines()]
    files = [name for words in lines if words[0] == "include" for name in words[1:]]
    folders = [words[1] for words in lines if words[0] == "recursive-include"]
    assert len(files) > 4
    assert [name for name in (*files, *folders) if not Path(ROOT, name).exists()] == []
