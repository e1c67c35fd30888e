"""Settings of an application under Ray Serve, from the arguments of `serve run` or of Python."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from arguments import parse_server_arguments
from arguments.flags import Flag, closest, shown
from arguments.groups import SERVER_GROUPS
from arguments.megatron.synonyms import SYNONYMS
from arguments.removed import refuse_removed
from megatron_ext.config import ServerSettings
from megatron_ext.config.annotations import FieldType, MismatchError, field_types
from megatron_ext.config.options import option, require, require_options
from megatron_ext.config.routing import RoutingConfig, RoutingPolicyName
from megatron_ext.errors import ConfigError

WEIGHTS = "weights"
_POINTS = 3  # reports of a replica in the window, at least
_INTERVAL = 10.0  # seconds between two reports, at most
EMBEDDED = "embedded"
# Requests of one replica that Ray passes on at once; others wait in Ray. Above what an engine admits, so that a full
# replica answers with the server's own 429.
MAX_ONGOING_REQUESTS = 1000
STRATEGIES = ("PACK", "STRICT_PACK", "SPREAD", "STRICT_SPREAD")
PREFIX, SERVE = "prefix", "serve"
_MANY, _LONG = 2**20, 2**40
_NOT_HERE = {
    "host": "Ray's proxies listen; give `serve start --http-host`",
    "port": "Ray's proxies listen; give `serve start --http-port`",
    "save": "each replica would write it; save the model with megatron-ext run",
}


def weights_of(user_config: Mapping[str, object] | None) -> str:
    """Return the directory of weights that a configuration names: `{"weights": DIR}`.

    Raises:
        ConfigError: The configuration is not of this form.
    """
    given = dict(user_config or {})
    path = given.pop(WEIGHTS, None)
    require(isinstance(path, str) and not given, f'user_config={user_config} is not of the form {{"{WEIGHTS}": DIR}}')
    return str(path)


Setting: TypeAlias = str | int | float | bool | os.PathLike[str] | Sequence[str | int] | None


@dataclass(frozen=True)
class DeploymentConfig:
    """Number and resources of the replicas, and how replicas replace each other.

    Attributes:
        num_replicas: Number of replicas; with autoscaling, at the start.
        max_replicas: Maximum number of replicas; None for as many as `num_replicas`, always.
        min_replicas: Minimum number of replicas.
        target_ongoing_requests: Requests of each replica that Ray's autoscaler aims at.
        scaling_window: Seconds over which requests are averaged.
        upscale_delay: Seconds for which more replicas must be wanted.
        downscale_delay: Seconds for which fewer replicas must be wanted.
        num_ingress_replicas: Number of ingresses.
        max_surge_percent: Extra replicas during an update, as a percentage of the replicas; 0 for none.
        weights: Directory below `weights_root` with weights that replace the model's.
        num_cpus: CPUs that Ray reserves for each rank of a replica; None for Ray's default of one.
        num_gpus: GPUs of each rank.
        placement_group_strategy: Nodes of a replica's ranks, as Ray names it.
        replica_timeout: Seconds without a sign of life after which a replica is replaced.
        max_ongoing_requests: Requests that Ray passes to a replica at once.
        router: "prefix": an ingress sends requests to where their prefix is cached; "serve": Ray's proxies call the
            replicas by Ray's own rule. None for the first one if there are several replicas with prefix caching.
        routing_policy: See `RoutingConfig`.
        routing_alpha: See `RoutingConfig`.
    """

    num_replicas: int = option(1, minimum=1, maximum=_MANY)
    max_replicas: int | None = None
    min_replicas: int = option(1, minimum=1, maximum=_MANY)
    target_ongoing_requests: float = option(32.0, above=0, maximum=_LONG)
    scaling_window: float = option(30.0, above=0, maximum=_LONG)
    upscale_delay: float = option(30.0, minimum=0, maximum=_LONG)
    downscale_delay: float = option(600.0, minimum=0, maximum=_LONG)
    num_ingress_replicas: int = option(1, minimum=1, maximum=_MANY)
    max_surge_percent: int = option(0, minimum=0, maximum=100)
    weights: str | None = None
    num_cpus: float | None = option(None, minimum=0, maximum=_MANY)
    num_gpus: float = option(0.0, minimum=0, maximum=_MANY)
    placement_group_strategy: str = option("PACK", choices=STRATEGIES)
    replica_timeout: float = option(30.0, above=0, maximum=_MANY)
    max_ongoing_requests: int = option(MAX_ONGOING_REQUESTS, minimum=1)
    router: str | None = option(None, choices=(PREFIX, SERVE))
    routing_policy: str = RoutingPolicyName.LEAST_COMPUTED.value
    routing_alpha: float = 0.5

    def __post_init__(self) -> None:
        require_options(self, by_flag=False)
        require(
            self.max_replicas is not None or self.min_replicas == 1,
            f"min_replicas={self.min_replicas} without max_replicas; give both or neither",
        )
        require(
            self.min_replicas <= self.num_replicas <= self.most,
            f"num_replicas={self.num_replicas} must be from min_replicas={self.min_replicas} to "
            f"max_replicas={self.most}",
        )
        assert self.routing, "checked by its own settings"

    @property
    def most(self) -> int:
        """Maximum number of replicas."""
        return self.num_replicas if self.max_replicas is None else self.max_replicas

    @property
    def scaling_options(self) -> dict[str, object]:
        """Options of Ray's deployment."""
        options: dict[str, object] = {"max_surge_percent": self.max_surge_percent}
        if self.weights is not None:
            options["user_config"] = {WEIGHTS: self.weights}
        if self.max_replicas is None:
            return options | {"num_replicas": self.num_replicas}
        scaling: dict[str, object] = {
            "min_replicas": self.min_replicas,
            "initial_replicas": self.num_replicas,
            "max_replicas": self.max_replicas,
            "target_ongoing_requests": self.target_ongoing_requests,
            "look_back_period_s": self.scaling_window,
            "upscale_delay_s": self.upscale_delay,
            "downscale_delay_s": self.downscale_delay,
        }
        if self.scaling_window < _POINTS * _INTERVAL:
            scaling["metrics_interval_s"] = self.scaling_window / _POINTS
        return options | {"autoscaling_config": scaling}

    @property
    def routing(self) -> RoutingConfig:
        """Settings of the router."""
        return RoutingConfig(self.routing_policy, self.routing_alpha)

    @property
    def actor_options(self) -> dict[str, float]:
        """Options of a replica's actor."""
        options = {"num_gpus": self.num_gpus} if self.num_gpus else {}
        return options if self.num_cpus is None else options | {"num_cpus": self.num_cpus}

    @property
    def bundle(self) -> dict[str, float]:
        """Resources of one rank in its replica's placement group."""
        cpus = 1.0 if self.num_cpus is None else self.num_cpus
        return {name: value for name, value in (("CPU", cpus), ("GPU", self.num_gpus)) if value}


_KINDS = field_types(DeploymentConfig)


@dataclass(frozen=True)
class AppSettings:
    """Settings of an application.

    Attributes:
        deployment: Resources of the replicas.
        words: Command line of `megatron-ext serve` with a replica's settings; a replica parses it again, since files
            that it names are on the replica's machine.
        server: The parsed words.
    """

    deployment: DeploymentConfig
    words: tuple[str, ...]
    server: ServerSettings

    def __post_init__(self) -> None:
        weights, root = self.deployment.weights, self.server.server.weights_root
        require(weights is None or root is not None, f"weights={weights} needs weights_root; give both or neither")
        require(
            self.ranks == 1 or bool(self.deployment.bundle),
            f"num_cpus={self.deployment.num_cpus} and no GPU with {self.ranks} ranks: Ray cannot place them; "
            "give num_cpus or num_gpus",
        )
        if self.deployment.router != PREFIX:
            return
        require(
            self.server.cache.enable_prefix_caching,
            "router=prefix without prefix caching: no replica has a prefix; give router=serve",
        )
        endpoint = self.server.server.kv_events.kv_events_endpoint
        require(
            endpoint is None,
            f"router=prefix and kv_events_endpoint={endpoint} contradict each other: a cache reports to one of them; "
            "give router=serve",
        )

    @property
    def ranks(self) -> int:
        """Number of ranks of a replica."""
        return self.server.parallel.smallest_world

    @property
    def routes_by_prefix(self) -> bool:
        """True if an ingress routes by cached prefixes."""
        if self.deployment.router is not None:
            return self.deployment.router == PREFIX
        is_possible = self.server.cache.enable_prefix_caching and not self.server.server.kv_events.kv_events_endpoint
        return self.deployment.most > 1 and is_possible


def read_app_settings(given: Mapping[str, Setting]) -> AppSettings:
    """Return the settings of arguments.

    Args:
        given: Flags of `megatron-ext serve` by name, with underscores, as typed values or as texts; fields of
            `DeploymentConfig`; and `model`, the directory of a checkpoint in any format, or "embedded".

    Raises:
        ConfigError: A name is unknown, a value has the wrong type, or the server would refuse it.
    """
    rest = dict(given)
    resources = {name: _resource(name, rest.pop(name), kind.item) for name, kind in _KINDS.items() if name in rest}
    words = [*_model_words(rest.pop("model", None), rest), *_words(rest)]
    server = parse_server_arguments(words)
    return AppSettings(DeploymentConfig(**resources), tuple(words), server)  # type: ignore[arg-type]  # of `_KINDS`


def _resource(name: str, value: Setting, kind: type) -> object:
    try:
        if kind is str and isinstance(value, str):
            return value
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ValueError
        return kind(value)
    except ValueError:
        raise ConfigError(f"{name}={shown(value)} is not a {'text' if kind is str else 'number'}") from None


def _model_words(model: Setting, others: Mapping[str, Setting]) -> list[str]:
    """Return the flag of `model=`: a directory with a `config.json` is one of Hugging Face's format."""
    if model is None or model == EMBEDDED:
        return []
    contrary = next((name for name in ("load", "load_hf") if others.get(name) is not None), None)
    require(contrary is None, f"model={shown(model)} and {contrary} contradict each other; give one of them")
    if not isinstance(model, str | os.PathLike):
        raise ConfigError(f"model={shown(model)} is not a directory")
    is_hf = (Path(model) / "config.json").is_file()
    return [f"{'--load-hf' if is_hf else '--load'}={os.fspath(model)}"]


def _words(given: Mapping[str, Setting]) -> list[str]:
    flags = (flag for group in (*SERVER_GROUPS, SYNONYMS) for flag in group.flags)
    known = {key.replace("-", "_"): flag for flag in flags for key in flag.keys}
    words: list[str] = []
    for name, value in given.items():
        refuse_removed(name, value if isinstance(value, str) else None, name)
        if name not in known:
            meant = closest(name, [*known, *_KINDS, "model"])
            hint = f"did you mean {meant}?" if meant else "megatron-ext serve --help=all lists the names"
            raise ConfigError(f"{name} is not a setting; {hint}")
        flag = known[name]
        require(flag.field not in _NOT_HERE, f"{name}={shown(value)}: {_NOT_HERE.get(flag.field)}")
        if value is not None:
            words += _flag_words(name, value, flag)
    return words


def _flag_words(name: str, value: Setting, flag: Flag) -> list[str]:
    kind = flag.kind
    if kind.item is bool:
        return [flag.option if _truth(name, value, kind) else f"--no-{flag.key}"]
    values = [os.fspath(value) if isinstance(value, os.PathLike) else value]
    if isinstance(value, Sequence) and not isinstance(value, str):
        values = list(value)
    texts = [str(one) for one in values]
    if kind.is_tuple and kind.item is int and not kind.length:
        return [f"{flag.option}={','.join(texts)}"]
    return [f"{flag.option}={texts[0]}"] if len(texts) == 1 else [flag.option, *texts]


def _truth(name: str, value: Setting, kind: FieldType) -> bool:
    text = {"true": True, "false": False}.get(value.lower()) if isinstance(value, str) else value
    try:
        return bool(kind.convert(text))
    except MismatchError as error:
        raise ConfigError(f"{name}={shown(value)} is not {error}") from None
