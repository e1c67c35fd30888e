"""Private names of megatron-core and torch: each that we use is in the table, and each in the table is still there."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import pkgutil
import re
import sys
import textwrap
from pathlib import Path

import pytest

import megatron_ext.mcore
from megatron_ext.mcore import upstream_names, versions
from megatron_ext.mcore.upstream_names import is_there, missing_names, names_of
from tests.unit_tests.support.source import (
    PACKAGE,
    defined_attributes,
    is_private,
    parse,
    private_attributes,
    private_imports,
    python_files,
)

MCORE = PACKAGE / "mcore"
EVERY = names_of((99,))  # of all versions
LISTED = {name for _, name in EVERY}


def is_megatrons(module: str) -> bool:
    return module.split(".")[0] == "megatron"


def attributes_of(cls: type) -> set[str]:
    """Attributes that instances of `cls` inherit from megatron-core, including instance variables (by its source).

    Of a class of torch's own what it declares, parents included.
    """
    if cls.__module__.startswith("torch."):
        return set(dir(cls)).union(*(vars(base).get("__annotations__", ()) for base in cls.__mro__))
    return set().union(*(_own_attributes(base) for base in cls.__mro__ if is_megatrons(base.__module__)))


@functools.cache
def _own_attributes(cls: type) -> set[str]:
    return set(vars(cls)) | defined_attributes(ast.parse(textwrap.dedent(inspect.getsource(cls))))


@pytest.mark.parametrize(("where", "name"), names_of(versions.VERSION))
def test_the_installed_version_has_it(where, name):
    assert is_private(name)
    assert is_there(where, name)


def test_missing_names_are_found(monkeypatch: pytest.MonkeyPatch):
    """Names of modules, classes and instances, and of a module that is gone; not those of another version."""
    context = "megatron.core.inference.contexts.dynamic_context"
    table = {context: ("_gone",), f"{context}.DynamicInferenceContext": ("_lost",), f"{context}_old": ("_left",)}
    monkeypatch.setattr(upstream_names, "UPSTREAM_NAMES", upstream_names.UPSTREAM_NAMES | table)
    monkeypatch.setattr(upstream_names, "NAMES_SINCE_0_17", {context: ("_later",)})
    missing = [f"{context}._gone", f"{context}.DynamicInferenceContext._lost", f"{context}_old._left"]
    assert missing_names((0, 16, 1)) == missing
    assert missing_names((0, 17, 0)) == [*missing, f"{context}._later"]


OURS = [
    path
    for folder in ("megatron_ext", "arguments", "tools", "examples")
    for path in python_files(PACKAGE.parent / folder)
]


PUBLIC = {"_exit", "_getframe"}  # of os and sys, whose documentation has them
OTHERS = {
    "deployment.py": {"_fetch_replica_results_async"},  # of Ray's; docs/ray.md says why
    # What a forward finds in modules: torch's public functions build lists of it, too slow for each step.
    "recorded_steps.py": {"_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks"}
    | {"_global_forward_hooks", "_global_forward_pre_hooks"},
    "inference_args.py": {"_actions"},  # of a caller's argparse parser, which has no public list of its options
    # Of Triton's interpreter, and of storages on the meta device, which have no address.
    "virtual_launch.py": {"_cdata", "_implicit_cvt", "_interpreter", "_patch_lang"},
}


def unexplained(path: Path) -> list[tuple[int, str]]:
    """Private names that a file uses and that are neither its own nor those of one of our classes that it imports."""
    tree = parse(path)
    own = defined_attributes(tree)
    others = [(line, name) for line, name in private_attributes(tree) if name not in own]
    for node in ast.walk(tree) if others else ():
        if isinstance(node, ast.ImportFrom) and node.module.startswith("megatron_ext"):
            own |= _attributes_of_module(node.module)
    return [(line, name) for line, name in others if name not in own]


@functools.cache
def _attributes_of_module(module: str) -> set[str]:
    source = PACKAGE.parent / Path(*module.split("."))
    path = source.with_suffix(".py") if source.with_suffix(".py").exists() else source / "__init__.py"
    return defined_attributes(parse(path))


def test_every_private_name_is_ours_or_listed():
    """Outside mcore/ `OTHERS` has the exceptions: names of Ray's, argparse's, torch's and Triton's."""
    found = [
        f"{path}: {line}: {name}"
        for path in OURS
        for line, name in unexplained(path)
        if not (path.is_relative_to(MCORE) and name in LISTED) and name not in PUBLIC | OTHERS.get(path.name, set())
    ]
    assert found == []


def test_every_private_import_is_listed():
    """Outside mcore/ nothing private of megatron-core is imported."""
    found = [
        f"{path}: {module} {name}"
        for path in OURS
        if re.search(r"(from|import) megatron\b", path.read_text("utf-8"))
        for module, name in private_imports(parse(path))
        if is_megatrons(module) and not (path.is_relative_to(MCORE) and (module, name) in EVERY)
    ]
    assert found == []


def test_every_listed_name_is_used():
    used = set()
    for path in python_files(MCORE):
        tree = parse(path)
        used |= {name for _, name in private_attributes(tree)} | {name for _, name in private_imports(tree)}
        used |= defined_attributes(tree)
    assert used >= LISTED


def our_subclasses() -> list[type]:
    """Classes of ours with a base class in megatron-core."""
    found: dict[str, type] = {}
    packages = [megatron_ext.mcore, importlib.import_module("megatron_ext.mixers")]
    for package in packages:
        for info in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            if info.name.startswith(f"{versions.__name__}.") and info.name not in sys.modules:
                continue  # for another version
            for cls in vars(importlib.import_module(info.name)).values():
                if (
                    isinstance(cls, type)
                    and cls.__module__ == info.name
                    and any(is_megatrons(base.__module__) for base in cls.__mro__)
                ):
                    found[cls.__qualname__] = cls
    return list(found.values())


def test_no_private_name_of_ours_is_upstreams_by_accident():
    """A helper method of ours that upstream also calls would be overridden unnoticed."""
    overridden = {}
    for cls in our_subclasses():
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
        ours = {name for name in defined_attributes(tree) if is_private(name)}
        overridden[cls.__name__] = (ours & attributes_of(cls)) - LISTED
    assert len(overridden) > 20
    assert {name: names for name, names in overridden.items() if names} == {}


class TestTheScan:
    """The scan sees what it should."""

    SOURCE = textwrap.dedent(
        """
        from megatron.core.somewhere import _helper, public
        import megatron._hidden
        class Ours(Theirs):
            _field: int = 0
            def _method(self):
                self._set = self._method()
                self._theirs()
                return getattr(other, "_by_name"), self.__class__, other._set
        """
    )

    def test_private_attributes(self):
        tree = ast.parse(self.SOURCE)
        assert {name for _, name in private_attributes(tree)} == {"_set", "_method", "_theirs", "_by_name"}
        assert {name for name in defined_attributes(tree) if is_private(name)} == {"_field", "_method", "_set"}
