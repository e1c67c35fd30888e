"""Groups of samples: requests whose answers are to come from one version of the weights.

A group is bound to the version of the replica that its first request is sent to.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from megatron_ext.coordinator.membership.versions import Version
from megatron_ext.server.api_errors import ApiError

GROUP_HEADER = "x-megatron-ext-sample-group"
LONGEST_NAME = 256  # characters
MAX_GROUPS = 2**16  # kept without a request in flight; older ones are forgotten


@dataclass
class _Group:
    version: Version
    in_flight: int = 0
    has_answered: bool = False


class SampleGroups:
    """Versions of the weights of groups of samples.

    Args:
        max_groups: Maximum number of groups.
    """

    def __init__(self, max_groups: int = MAX_GROUPS) -> None:
        self._max_groups = max_groups
        self._groups: OrderedDict[str, _Group] = OrderedDict()  # least recently used first

    def version(self, name: str | None) -> Version | None:
        """Return the version that a group is bound to; None if it has not begun, or without a group."""
        group = None if name is None else self._groups.get(name)
        return None if group is None else group.version

    def began(self, name: str, version: Version) -> None:
        """Note that a request of a group is sent to a replica of a version."""
        group = self._groups.setdefault(name, _Group(version))
        assert group.version == version, f"group {name!r} of version {group.version} runs with {version}"
        group.in_flight += 1
        self._groups.move_to_end(name)
        while len(self._groups) > self._max_groups and not next(iter(self._groups.values())).in_flight:
            self._groups.popitem(last=False)

    def ended(self, name: str, *, has_answered: bool) -> None:
        """Note the end of a request; a group of which no replica has answered anything is forgotten."""
        group = self._groups[name]
        group.in_flight -= 1
        group.has_answered |= has_answered
        if not group.in_flight and not group.has_answered:
            del self._groups[name]


def group_name(value: str | None) -> str | None:
    """Return the name of a group from the header's value.

    Raises:
        ApiError: It is empty or too long.
    """
    if value is not None and not 1 <= len(value) <= LONGEST_NAME:
        raise ApiError(400, f"{GROUP_HEADER}: has {len(value)} characters; give 1 to {LONGEST_NAME}")
    return value


def version_gone(version: Version) -> ApiError:
    """409: no replica has the weights of a group any more."""
    return ApiError(
        409,
        f"this group of samples began with weights version {version}, which no replica has now; sample the group again "
        f"under another name, or leave {GROUP_HEADER} out if versions may be mixed",
        code="weights_version_gone",
    )
