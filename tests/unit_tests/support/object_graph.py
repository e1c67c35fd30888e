"""Sizes of all containers that can be reached from some objects, by the names of their attributes."""

from __future__ import annotations

import functools
import gc
import sys
import types
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping

ENTRIES = (dict, list, set, frozenset, tuple, deque)
BYTES = (bytearray, memoryview)
FOLLOWED = ("megatron_ext", "prometheus_client")  # packages whose instances are looked into
CALLABLES = (types.FunctionType, types.MethodType, functools.partial, types.CellType, staticmethod, classmethod)


def sizes(roots: Mapping[str, object]) -> Counter[str]:
    """Return the numbers of entries of all containers, and of all instances, that can be reached.

    A container is named by the class and the attribute that hold it, `Class.attribute[]` if it is inside of another
    one; containers of one name count together. Caches of functions are named by their function. Each object counts
    once, where the shortest way to it ends.

    Args:
        roots: Objects by name. Classes and functions of this package's modules are roots, too.
    """
    gc.collect()
    roots = {**roots, **_modules()}
    found: Counter[str] = Counter()
    seen = {id(found), id(roots)}
    waiting = deque(roots.items())
    while waiting:
        name, one = waiting.popleft()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, ENTRIES) or type(one).__name__ == "array":
            found[name] += len(one)
        elif isinstance(one, functools._lru_cache_wrapper):
            found[f"{one.__module__}.{one.__qualname__}()"] += one.cache_info().currsize
        elif _is_followed(type(one)):
            found[type(one).__qualname__] += 1
        waiting.extend(_parts(name, one))
    return found


def _modules() -> dict[str, object]:
    """Return all globals of this package's modules, and attributes of its classes."""
    found: dict[str, object] = {}
    for module in [one for name, one in sys.modules.items() if name.partition(".")[0] == "megatron_ext"]:
        for name, value in list(vars(module).items()):
            if not isinstance(value, type):
                found[f"{module.__name__}.{name}"] = value
            elif value.__module__ == module.__name__:
                found |= {f"{value.__qualname__}.{key}": part for key, part in list(vars(value).items())}
    return found


def _is_followed(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in FOLLOWED


def _parts(name: str, one: object) -> Iterator[tuple[str, object]]:
    """Yield what an object refers to, with names."""
    if isinstance(one, dict):
        yield from ((f"{name}[]", part) for part in (*one, *one.values()) if not _is_atom(part))
    elif isinstance(one, ENTRIES) and not hasattr(one, "_fields"):
        yield from ((f"{name}[]", part) for part in one if not _is_atom(part))
    elif isinstance(one, CALLABLES):
        yield from ((f"{name}()", part) for part in _captured(one))
    elif _is_followed(type(one)):
        yield from ((f"{type(one).__qualname__}.{key}", part) for key, part in _attributes(one))
    elif type(one).__module__ in ("weakref", "asyncio.locks", "concurrent.futures._base", "collections"):
        yield from ((f"{name}.{key}", part) for key, part in getattr(one, "__dict__", {}).items())


def _is_atom(value: object) -> bool:
    return isinstance(value, int | float | str | bytes | type(None) | type)


def _captured(function: object) -> Iterable[object]:
    if isinstance(function, types.FunctionType):
        return (*(function.__closure__ or ()), *(function.__defaults__ or ()), function.__dict__)
    return gc.get_referents(function)


def _attributes(one: object) -> Iterator[tuple[str, object]]:
    yield from list(getattr(one, "__dict__", {}).items())
    for kind in type(one).__mro__:
        slots = vars(kind).get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            if slot not in ("__dict__", "__weakref__") and hasattr(one, slot):
                yield slot, getattr(one, slot)
    if hasattr(one, "_fields"):
        yield from ((field, getattr(one, field)) for field in one._fields)
