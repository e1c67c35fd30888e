"""Groups of replicas that can answer for each other: equal served name, model configuration and tokenizer.

A group exists while a replica of it is in the router; its identity is that of the first one. Weights are a version
inside a group: that of the coordinator's last update, or else the one that most of its replicas have. Replicas with
another one get no new requests, unless an update of the weights has been announced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from megatron_ext.coordinator.membership.heartbeat import Heartbeat, Identity
from megatron_ext.coordinator.membership.member import Member
from megatron_ext.coordinator.membership.versions import Target
from megatron_ext.server.api_errors import ApiError, unknown_model


class Groups:
    """Groups of a fleet's replicas: those of one served name, model configuration and tokenizer.

    Args:
        members: Members of the fleet by URL, which this class only reads, except for `Member.is_outdated`.
        models: Served names that replicas may have; empty: that of the first replica.

    Attributes:
        updating: Instances of the replicas of an announced update, which may have other weights until it ends.
        targets: Weights of each group's last update, by its name.
    """

    def __init__(self, members: Mapping[str, Member], models: Collection[str] = ()) -> None:
        self._members = members
        self._models = tuple(models)
        self.updating: frozenset[str] = frozenset()
        self.targets: dict[str, Target] = {}

    def _known(self) -> list[tuple[Member, Heartbeat]]:
        return [(one, one.beat) for one in self._members.values() if one.is_known and one.beat is not None]

    @property
    def names(self) -> list[str]:
        """Names of the groups that are served or may be."""
        return list(self._models or dict.fromkeys(beat.model for _, beat in self._known()))

    def refusal(self, member: Member, identity: Identity) -> str:
        """Return why a replica may not be in the fleet; empty if it may."""
        groups = {beat.model: beat.identity for one, beat in self._known() if one is not member}
        group = groups.get(identity.model)
        if group is not None and group != identity:
            return f"it serves {identity}, and the other replicas of this name serve {group}"
        names = self._models or groups
        if names and identity.model not in names:
            served = [str(groups.get(name, repr(name))) for name in names]
            return f"it serves {identity}, and this coordinator serves {', '.join(served)}; see --model"
        return ""

    def outside(self, group: str | None) -> list[str]:
        """Return the URLs of replicas that are not in a group; or no URLs without a group."""
        return [] if group is None else [one.url for one, beat in self._known() if beat.model != group]

    def members(self, group: str | None, among: Iterable[Member]) -> list[Member]:
        """Return the members of a group; or all members without a group."""
        return [one for one in among if group is None or (one.beat is not None and one.beat.model == group)]

    def resolve(self, model: object) -> str | None:
        """Return the group that a request means; None if it does not matter, since there is at most one.

        Args:
            model: Field `model` of a request; None if it has none.

        Raises:
            ApiError: 404 for an unknown model, 400 for none where there are several.
        """
        names = self.names
        if isinstance(model, str) and names:
            if model in names:
                return model
            aliases = self._aliases()
            if model not in aliases:
                raise unknown_model(model, *names, *aliases)
            return aliases[model]
        if len(names) > 1:
            raise ApiError(400, f"model: must be one of {', '.join(map(repr, names))}", param="model")
        return None

    def _aliases(self) -> dict[str, str]:
        """Return the group of each other name; of a name in several groups that of the replica that joined first."""
        found: dict[str, str] = {}
        for _, beat in sorted(self._known(), key=lambda pair: pair[0].joined_at):
            for alias in (*beat.identity.aliases, *([beat.root] if beat.root else [])):
                found.setdefault(alias, beat.model)
        return found

    def target(self, beat: Heartbeat) -> Target | None:
        """Return the weights that a replica is to have by the last update of its group; None without an update."""
        target = self.targets.get(beat.model)
        return target if target is not None and target.identity == beat.identity else None

    def weigh(self) -> list[Member]:
        """Update which replicas have other weights than their group; return those that changed."""
        changed = []
        for name in {beat.model for _, beat in self._known()}:
            group = [(one, beat) for one, beat in self._known() if beat.model == name]
            group.sort(key=lambda pair: pair[0].joined_at)
            counts = Counter(beat.weights for _, beat in group)
            version = max(counts, key=counts.__getitem__)  # the first of equals is the one that joined first
            target = self.target(group[0][1])
            for one, beat in group:
                is_other = beat.weights != version if target is None else one.version != target.version
                is_outdated = is_other and beat.instance not in self.updating
                if one.is_outdated != is_outdated:
                    one.is_outdated = is_outdated
                    changed.append(one)
        return changed
