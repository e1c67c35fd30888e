"""Parsing of hosts and origins from HTTP's `Host` and `Origin` headers and from `--allowed-hosts`."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from urllib.parse import urlsplit

ANY_HOST = "*"
LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "[::1]")
_LONGEST_PORT = 5  # digits
DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class HostName:
    """Normalized name or address, and a port; a port of None means any port, or the default one."""

    name: str
    port: int | None = None


def parse_host(text: str) -> HostName | None:
    """Parse a host such as `localhost`, `models.example:8443` or `[::1]:8000`; return None if it is not valid.

    Names are normalized: to lower case, without the final dot of the root, and IPv6 addresses to their short form.
    """
    name, port = _split(text)
    if not name or (port is not None and not is_port(port)):
        return None
    if name.startswith("["):
        address = _address(name[1:-1])
        if address is None:
            return None
        name = address
    elif any(character in name for character in " /\\@?#[]:,'\"") or not (name.isascii() and name.isprintable()):
        return None
    name = name.lower()
    return HostName(name.removesuffix(".") or name, None if port is None else int(port))


@dataclass(frozen=True)
class Origin:
    """Origin of web pages: scheme, host and port."""

    scheme: str
    host: HostName  # with its port


def parse_origin(text: str) -> Origin | None:
    """Parse an origin such as `https://app.example` or `http://[::1]:3000`; return None if invalid or `null`."""
    scheme, mark, rest = text.lower().partition("://")
    try:
        parts = urlsplit(text)
    except ValueError:
        return None
    host = parse_host(rest)
    if not mark or scheme not in DEFAULT_PORTS or host is None or parts.netloc.lower() != rest:
        return None
    return Origin(scheme, HostName(host.name, host.port or DEFAULT_PORTS[scheme]))


def _split(text: str) -> tuple[str, str | None]:
    """Split a text into name and port; an IPv6 address keeps its brackets."""
    if text.startswith("["):
        name, bracket, rest = text.partition("]")
        port = rest[1:] if rest.startswith(":") else None
        return (name + bracket, port) if bracket and (not rest or port is not None) else ("", None)
    name, colon, port = text.partition(":")
    return name, port if colon else None


def is_port(text: str) -> bool:
    """Return whether a text is the number of a port."""
    return text.isascii() and text.isdigit() and len(text) <= _LONGEST_PORT and int(text) <= 65535


def _address(text: str) -> str | None:
    try:
        return str(ipaddress.IPv6Address(text))
    except ValueError:
        return None


def is_loopback(host: str) -> bool:
    """Return whether an address to listen on is a loopback address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower().removesuffix(".") == "localhost"
