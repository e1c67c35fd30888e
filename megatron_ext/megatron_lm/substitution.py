"""Substitution of names in Megatron's modules by this package's objects, before a script imports them."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Final

from megatron_ext.api.loading import Setting
from megatron_ext.megatron_lm.constructors import ScriptContext, ScriptController, ScriptEngine, ScriptWrapper

_INFERENCE = "megatron.core.inference"

NAMES: Final[Mapping[str, tuple[type, tuple[str, ...]]]] = {
    "DynamicInferenceContext": (
        ScriptContext,
        (f"{_INFERENCE}.contexts", f"{_INFERENCE}.contexts.dynamic_context"),
    ),
    "GPTInferenceWrapper": (
        ScriptWrapper,
        (f"{_INFERENCE}.model_inference_wrappers.gpt.gpt_inference_wrapper",),
    ),
    "TextGenerationController": (
        ScriptController,
        (f"{_INFERENCE}.text_generation_controllers.text_generation_controller",),
    ),
    "DynamicInferenceEngine": (
        ScriptEngine,
        (f"{_INFERENCE}.engines", f"{_INFERENCE}.engines.dynamic_engine"),
    ),
}
"""Class in place of each of Megatron's, and the modules that scripts import the name from."""
APIS: Final = (f"{_INFERENCE}.apis", "megatron_ext.apis")
"""Module of Megatron's high-level interface, which 0.16.1 does not have, and the one in its place."""
APIS_MODULES: Final = tuple(f"{APIS[0]}.{name}" for name in ("async_llm", "llm", "serve_config"))
"""Modules inside it that a script may import from; ours has all names itself."""


@contextlib.contextmanager
def substituted(**settings: Setting) -> Iterator[None]:
    """Put this package's names in place of Megatron's; at the end put them back, and close the script's engines.

    Modules of megatron-core itself keep the classes that they imported before.

    Args:
        settings: Settings of `attach_engine` for engines that the script constructs by hand.
    """
    with contextlib.ExitStack() as undo:
        undo.callback(_close_all)
        undo.enter_context(_set(ScriptEngine, "settings", settings))
        for name, (ours, modules) in NAMES.items():
            for module in modules:
                undo.enter_context(_set(importlib.import_module(module), name, ours))
        undo.enter_context(_replaced_module(*APIS))
        yield


@contextlib.contextmanager
def _set(owner: ModuleType | type, name: str, value: object) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def _replaced_module(name: str, ours: str) -> Iterator[None]:
    """Put a module of ours in place of one of Megatron's that may not exist."""
    parent, _, leaf = name.rpartition(".")
    found = [importlib.import_module(name)] if importlib.util.find_spec(name) else []
    owner, module = importlib.import_module(parent), importlib.import_module(ours)
    parts = {one: sys.modules.get(one) for one in APIS_MODULES}
    sys.modules |= dict.fromkeys((name, *parts), module)
    setattr(owner, leaf, module)
    try:
        yield
    finally:
        for one in (name, *parts):
            del sys.modules[one]
        sys.modules |= {one: before for one, before in parts.items() if before is not None}
        delattr(owner, leaf)
        for before in found:
            sys.modules[name] = before
            setattr(owner, leaf, before)


def _close_all() -> None:
    while ScriptEngine.attached:
        ScriptEngine.attached.pop().close()
