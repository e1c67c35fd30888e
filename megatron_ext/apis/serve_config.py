"""Settings of the HTTP server of `MegatronLLM` and `MegatronAsyncLLM`."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field

from megatron_ext.config import ServerConfig
from megatron_ext.config.hosts import ANY_HOST
from megatron_ext.config.server import from_megatrons_parsers
from megatron_ext.errors import ConfigError

_LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass
class ServeConfig:
    """Settings of `serve`; names and defaults are Megatron's.

    Attributes:
        host: Address to listen on.
        port: Port; 0 for any free one.
        parsers: Names of response parsers; by default the model's chat template says which formats are parsed.
        verbose: Whether to log each request.
        frontend_replicas: Number of frontend processes in Megatron; here one thread serves, whatever it says.
        sock: Bound socket to listen on, in place of host and port; closed with the server.
    """

    host: str = "0.0.0.0"
    port: int = 5000
    parsers: list[str] = field(default_factory=list)
    verbose: bool = False
    frontend_replicas: int = 4
    sock: socket.socket | None = None

    def server_config(self) -> ServerConfig:
        """Return the settings of this package's server.

        Raises:
            ConfigError: A value is invalid or not supported.
        """
        parsers = from_megatrons_parsers(self.parsers)
        if self.frontend_replicas < 1:
            raise ConfigError(f"frontend_replicas {self.frontend_replicas} must be at least 1")
        # As in Megatron, an address that other machines reach admits any host name.
        hosts = () if self.host in _LOOPBACK else (ANY_HOST,)
        return ServerConfig(host=self.host, port=self.port, access_log=self.verbose, allowed_hosts=hosts, **parsers)
