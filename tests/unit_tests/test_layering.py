"""The arrows of docs/design.md: imports point downwards only, and what decides needs neither torch nor megatron."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

from tests.unit_tests.support.source import ROOT, imported_modules, parse, python_files

# What each part may import of our own; itself, always.
LEAVES = {"errors", "files", "http_client", "signals", "threads", "trusted_path"}
DECIDING = {"prefix_cache", "scheduling", "speculation", "engine"}
TOOLS = {"console", "offline", "server", "api", "apis", "megatron_lm", "ray_serve"}
ROOMS = {"config", "parallel", "text", "memory", "ops", "mixers", "mcore", "models", "runner"}
BESIDE = {"simulation", "routing"}  # used by their tools alone
EVENTS = {"kv_events"}  # for servers
COMMANDS = {"commands"}  # of the console script
EVERYTHING = LEAVES | DECIDING | TOOLS | ROOMS | BESIDE | EVENTS | COMMANDS
BELOW_TOOLS = EVERYTHING - COMMANDS - TOOLS - BESIDE - EVENTS
MAY_IMPORT = {
    "errors": set(),
    "files": {"errors"},
    "http_client": {"errors"},
    "signals": set(),
    "threads": set(),
    "trusted_path": set(),
    "config": {"errors"},
    "text": {"config", "errors", "files"},
    "prefix_cache": {"config", "errors", "threads", "trusted_path"},
    "scheduling": {"config", "errors", "prefix_cache"},
    "speculation": {"config", "errors", "prefix_cache", "scheduling"},
    "engine": {"config", "errors", "prefix_cache", "routing", "scheduling", "speculation", "text", "threads"},
    "kv_events": {"config", "errors", "prefix_cache"},
    "routing": {"config", "errors", "prefix_cache"},
    "simulation": {"config", "errors", "files", "http_client", "memory", *DECIDING},
    "memory": {"config", "errors", "ops", "prefix_cache", "scheduling"},
    "ops": {"errors", "trusted_path"},
    "mixers": {"config", "errors", "memory", "ops"},
    "parallel": {"config", "errors", "signals", *DECIDING},
    "runner": {"config", "errors", "engine", "prefix_cache", "scheduling", "text", "memory", "mixers", "ops"},
    "mcore": {*LEAVES, *DECIDING, "config", "parallel", "text", "memory", "ops", "mixers", "runner"},
    "models": {*LEAVES, *DECIDING, "config", "parallel", "text", "memory", "ops", "mixers", "mcore", "runner"},
    "console": BELOW_TOOLS,
    "offline": BELOW_TOOLS | {"console"},
    "server": BELOW_TOOLS | EVENTS | {"console"},
    "api": BELOW_TOOLS | {"console"},
    "apis": BELOW_TOOLS | {"__init__", "api", "server"},
    "megatron_lm": BELOW_TOOLS | {"console", "api", "apis"},
    "ray_serve": BELOW_TOOLS | EVENTS | {"console", "routing", "server"},
    "commands": EVERYTHING | {"__init__"},
    "__main__": {"commands"},
    "__init__": {"api", "config", "engine", "errors", "scheduling"},  # for type checkers; see tests/unit_tests/api
}
# The flags are what `load_engine` takes by name, and they know the settings only.
MAY_USE_THE_COMMAND_LINE = {"api", "commands", "ray_serve"}
ABOVE = {"arguments", "tools", "tests", "benchmarks", "examples"}  # what imports the package
PARTS_OF_AN_ENGINE = ("core", "context", "controller")
STANDARD_LIBRARY_ONLY = (*LEAVES, *DECIDING, "config", "routing")
WITHOUT_MEGATRON = (*STANDARD_LIBRARY_ONLY, "memory", "ops", "parallel", "simulation")


def part_of(path: Path) -> str:
    """The part of the package that a file is or belongs to."""
    return path.relative_to(ROOT / "megatron_ext").with_suffix("").parts[0]


def our_parts(modules: list[str]) -> set[str]:
    """Parts of the package among dotted module names."""
    return {name.split(".")[1] for name in modules if name.startswith("megatron_ext.")} & (EVERYTHING | {"__init__"})


def forbidden(part: str, modules: list[str]) -> set[str]:
    """Parts and packages among the imports of a file that its part may not import."""
    found = our_parts(modules) - MAY_IMPORT[part] - {part}
    foreign = {name.split(".")[0] for name in modules} - {"megatron_ext"}
    found |= (foreign & ABOVE) - ({"arguments"} if part in MAY_USE_THE_COMMAND_LINE else set())
    if part in WITHOUT_MEGATRON:
        found |= foreign & {"megatron"}
    if part in STANDARD_LIBRARY_ONLY:
        found |= foreign - set(sys.stdlib_module_names)
    return found


def test_imports_point_downwards():
    found = {}
    for path in python_files(ROOT / "megatron_ext"):
        found[str(path.relative_to(ROOT))] = forbidden(part_of(path), list(imported_modules(parse(path))))
    assert {name: imports for name, imports in found.items() if imports} == {}


def test_forbidden_imports_are_found():
    assert forbidden("scheduling", ["megatron_ext.engine.core", "torch", "json", "tools.mutants"]) == {
        *("engine", "torch", "tools"),
    }
    assert forbidden("parallel", ["megatron.core", "torch"]) == {"megatron"}
    assert forbidden("api", ["arguments.parser", "megatron_ext.api.engine"]) == set()


def reached_through(source: str) -> list[str]:
    """Expressions that use an attribute of the core, the context or the controller of another object."""
    found = []
    for node in ast.walk(ast.parse(source)):
        part = node.value if isinstance(node, ast.Attribute) else None
        if isinstance(part, ast.Attribute) and part.attr in PARTS_OF_AN_ENGINE:
            owner = part.value
            if not (isinstance(owner, ast.Name) and owner.id in ("self", "megatron")):
                found.append(ast.unparse(node))
    return found


def test_engines_are_not_reached_through():
    """`LLMEngine` offers what its callers need; megatron-core's parts, and ours behind them, are used in `mcore/`."""
    found = {}
    for path in python_files(ROOT / "megatron_ext"):
        if part_of(path) != "mcore":
            found[str(path.relative_to(ROOT))] = reached_through(path.read_text())
    assert {name: places for name, places in found.items() if places} == {}


def test_reaching_through_is_found():
    assert reached_through("self._engine.core.synchronize()") == ["self._engine.core.synchronize"]
    assert reached_through("serving.engine.context.plan.limits") == ["serving.engine.context.plan"]
    assert reached_through("core = engine.core; self.core.synchronize(); engine.limits.costs") == []


def test_the_command_line_needs_only_the_settings():
    found = {path.name: our_parts(list(imported_modules(parse(path)))) for path in python_files(ROOT / "arguments")}
    assert {name: parts for name, parts in found.items() if not parts <= {"config", "errors", "files"}} == {}


def test_decisions_run_without_torch():
    """Importing every module of the packages in a new process loads neither torch nor megatron nor numpy."""
    packages = [f"megatron_ext.{name}" for name in ("prefix_cache", "scheduling", "config", "engine")]
    packages += ["megatron_ext.ray_serve.prefix_routing", "megatron_ext.ray_serve.proxy"]
    code = f"""
import importlib, pkgutil, sys
for package in map(importlib.import_module, {packages!r}):
    for info in pkgutil.walk_packages(getattr(package, "__path__", []), package.__name__ + "."):
        importlib.import_module(info.name)
loaded = {{"torch", "megatron", "numpy", "transformers", "ray"}} & set(sys.modules)
assert not loaded, loaded
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
