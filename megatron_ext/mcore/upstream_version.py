"""Version of the megatron-core that Python finds, read without importing it, and the versions that are supported."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Final, NamedTuple

from megatron_ext.errors import ConfigError


class Version(NamedTuple):
    """Version of megatron-core, without what follows its three numbers."""

    major: int
    minor: int
    patch: int

    def __str__(self) -> str:
        return ".".join(map(str, self))


TESTED: Final = (Version(0, 16, 1), Version(0, 19, 2))
OLDEST, NEWEST = TESTED[0], TESTED[-1]
SUPPORTED: Final = f"{' and '.join(map(str, TESTED))} are tested, others from {OLDEST} on run with a warning"
_PARTS = ("MAJOR", "MINOR", "PATCH")
_NUMBER = re.compile(rf"^({'|'.join(_PARTS)}) = (\d+)$", re.MULTILINE)


def found_version() -> Version:
    """Return the version of the megatron-core that an import would find, or has found.

    Raises:
        ModuleNotFoundError: megatron-core is not installed.
        ConfigError: It does not say its version.
    """
    spec = importlib.util.find_spec("megatron.core")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("No module named 'megatron.core'", name="megatron.core")
    return version_in(Path(spec.origin).parent)


def version_in(folder: Path) -> Version:
    """Return the version of the megatron-core in a folder, its `megatron/core`.

    Raises:
        ConfigError: It does not say its version.
    """
    path = folder / "package_info.py"
    numbers = dict(_NUMBER.findall(path.read_text("utf-8"))) if path.exists() else {}
    if not numbers.keys() >= set(_PARTS):
        raise ConfigError(f"megatron-core in {folder} does not say its version; {SUPPORTED}")
    return Version(*(int(numbers[part]) for part in _PARTS))


def check_supported(version: Version) -> None:
    """Check that a version is not older than the oldest tested one.

    Raises:
        ConfigError: It is.
    """
    if version < OLDEST:
        raise ConfigError(f"megatron-core {version} is not supported: {SUPPORTED}; install megatron-core=={NEWEST}")
