"""Settings of scaling and of updates of an application under Ray Serve."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ext.config.checks import require
from megatron_ext.ray_serve.autoscaling import POLICY
from megatron_ext.ray_serve.user_config import WEIGHTS

_POINTS = 3  # reports of a replica in the window, at least
_INTERVAL = 10.0  # seconds between two reports, at most


@dataclass(frozen=True)
class ScalingConfig:
    """Number of replicas, and how replicas replace each other.

    Attributes:
        max_replicas: Maximum number of replicas; None for as many as `num_replicas`, always.
        min_replicas: Minimum number of replicas.
        waiting_tokens_per_replica: Prompt tokens that wait to be computed, for each replica, at most.
        scaling_window: Seconds over which loads are averaged.
        upscale_delay: Seconds for which more replicas must be wanted.
        downscale_delay: Seconds for which fewer replicas must be wanted.
        num_ingress_replicas: Number of ingresses.
        max_surge_percent: Extra replicas during an update, as a percentage of the replicas; 0 for none.
        weights: Directory below `weights_root` with weights that replace the model's.
    """

    max_replicas: int | None = None
    min_replicas: int = 1
    waiting_tokens_per_replica: float = 32768.0
    scaling_window: float = 30.0
    upscale_delay: float = 30.0
    downscale_delay: float = 600.0
    num_ingress_replicas: int = 1
    max_surge_percent: int = 0
    weights: str | None = None

    def __post_init__(self) -> None:
        most = 2**20
        for name in ("min_replicas", "num_ingress_replicas"):
            require(1 <= getattr(self, name) <= most, f"{name}={getattr(self, name)} must be at least 1")
        for name in ("waiting_tokens_per_replica", "scaling_window"):
            require(0 < getattr(self, name) <= 2**40, f"{name}={getattr(self, name)} must be positive")
        for name in ("upscale_delay", "downscale_delay"):
            require(0 <= getattr(self, name) <= 2**40, f"{name}={getattr(self, name)} must not be negative")
        require(0 <= self.max_surge_percent <= 100, f"max_surge_percent={self.max_surge_percent} must be 0 to 100")

    def check(self, num_replicas: int) -> None:
        """Check the bounds of the number of replicas.

        Raises:
            ConfigError: The number is outside of them.
        """
        most = self.most(num_replicas)
        require(
            self.max_replicas is not None or self.min_replicas == 1,
            f"min_replicas={self.min_replicas} without max_replicas; give both or neither",
        )
        require(
            self.min_replicas <= num_replicas <= most,
            f"num_replicas={num_replicas} must be from min_replicas={self.min_replicas} to max_replicas={most}",
        )

    def most(self, num_replicas: int) -> int:
        """Return the maximum number of replicas."""
        return num_replicas if self.max_replicas is None else self.max_replicas

    @property
    def rule(self) -> tuple[float, int] | None:
        """Waiting tokens of a replica, and the minimum number of replicas; None without autoscaling."""
        return None if self.max_replicas is None else (self.waiting_tokens_per_replica, self.min_replicas)

    def options(self, num_replicas: int) -> dict[str, object]:
        """Return options of Ray's deployment.

        Args:
            num_replicas: Number of replicas at the start.
        """
        options: dict[str, object] = {"max_surge_percent": self.max_surge_percent}
        if self.weights is not None:
            options["user_config"] = {WEIGHTS: self.weights}
        if self.max_replicas is None:
            return options | {"num_replicas": num_replicas}
        policy = {"tokens_per_replica": self.waiting_tokens_per_replica, "patience": self.downscale_delay}
        scaling: dict[str, object] = {
            "min_replicas": self.min_replicas,
            "initial_replicas": num_replicas,
            "max_replicas": self.max_replicas,
            "look_back_period_s": self.scaling_window,
            "upscale_delay_s": self.upscale_delay,
            "downscale_delay_s": self.downscale_delay,
            "policy": {"policy_function": POLICY, "policy_kwargs": policy},
        }
        if self.scaling_window < _POINTS * _INTERVAL:
            scaling["metrics_interval_s"] = self.scaling_window / _POINTS
        return options | {"autoscaling_config": scaling}
