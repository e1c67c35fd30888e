"""API keys of a server: their sources, and the routes that each of them opens.

Every API key is a tenant. Its requests have a separate cache, because their salts are bound to the key: neither
`cached_tokens` nor the time to the first token reveals anything about another key's prompts.
"""

from __future__ import annotations

import hmac
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from megatron_ext.config.server import ServerConfig, key_problem
from megatron_ext.errors import ConfigError
from megatron_ext.files import read_text

API_KEY_VARIABLE = "MEGATRON_EXT_API_KEY"
LARGEST_FILE = 1 << 20  # bytes
_TENANT_DOMAIN = b"mext.tenant"
_TENANT_BYTES = 16


@dataclass(frozen=True)
class Caller:
    """Authenticated caller of a request.

    Attributes:
        tenant: Identifier of the key in the salts of its requests: equal in every process, so that replicas agree, and
            different from the key. "" on a server without keys.
        can_generate: Whether the routes of `/v1` are open.
        can_administrate: Whether the routes that affect all tenants' caches are open.
    """

    tenant: str = ""
    can_generate: bool = True
    can_administrate: bool = True

    def bind(self, salt: str | None) -> str | None:
        """Return the salt that the engine sees. Two callers never share one, whatever salts their clients choose."""
        if not self.tenant:
            return salt
        return self.tenant if salt is None else f"{self.tenant}:{salt}"


class Keys:
    """All keys of a server.

    Args:
        api_keys: Keys of the tenants; if empty, no key is needed.
        admin_key: The only key that opens the routes of administrators; None if there is no such key.
        is_admins_apart: Whether these routes stay closed without an admin key, even to the holder of a single API key.

    Raises:
        ConfigError: A key occurs twice.
    """

    def __init__(
        self, api_keys: Sequence[str] = (), admin_key: str | None = None, *, is_admins_apart: bool = False
    ) -> None:
        if admin_key in api_keys:
            raise ConfigError("--admin-key-file has a key that is also an API key; give administrators a separate key")
        self._secret = secrets.token_bytes(32)
        self.are_needed = bool(api_keys)
        self.has_admin_key = admin_key is not None
        is_shared = admin_key is None and not is_admins_apart  # with the only API key, or without keys
        self._callers = {
            self._mark(key): Caller(_tenant(key), True, is_shared and len(api_keys) == 1) for key in api_keys
        }
        self.stranger = Caller(can_generate=not api_keys, can_administrate=is_shared and not api_keys)
        if admin_key is not None:
            self._callers[self._mark(admin_key)] = Caller(can_generate=False)

    def caller(self, key: bytes) -> Caller | None:
        """Return the caller with this key; None if the key is unknown. Takes the same time for every key."""
        given, found = self._mark(key), None
        for mark, caller in self._callers.items():
            if hmac.compare_digest(mark, given):
                found = caller
        return found

    @property
    def has_administrator(self) -> bool:
        """Return whether some key opens the routes of administrators."""
        return any(caller.can_administrate for caller in self._callers.values())

    def _mark(self, key: str | bytes) -> bytes:
        """Return the mark of a key for comparison: of fixed length, and useless without the secret."""
        return blake2b(key.encode() if isinstance(key, str) else key, key=self._secret).digest()


def _tenant(key: str) -> str:
    return blake2b(key.encode(), digest_size=_TENANT_BYTES, person=_TENANT_DOMAIN).hexdigest()


def load_keys(settings: ServerConfig, environment: Mapping[str, str] | None = None) -> Keys:
    """Return the keys that the settings and the environment name.

    Args:
        settings: Key settings; their files are read once, now.
        environment: Environment variables; by default the process's own.

    Raises:
        ConfigError: API keys come from two sources, a key file is unreadable or malformed, or admin routes have no key.
    """
    environment = os.environ if environment is None else environment
    from_variable = environment.get(API_KEY_VARIABLE)
    flag = "--api-key" if settings.api_key is not None else "--api-key-file" if settings.api_key_file else None
    if from_variable is not None and flag is not None:
        raise ConfigError(f"the variable {API_KEY_VARIABLE} and {flag} both give API keys; give one of them")
    admin_key = None if settings.admin_key_file is None else _only_key(settings.admin_key_file)
    if from_variable is not None:
        problem = key_problem(from_variable)
        if problem is not None:
            raise ConfigError(f"the variable {API_KEY_VARIABLE} {problem}; unset it to admit all clients")
        api_keys = [from_variable]
    elif settings.api_key_file is not None:
        api_keys = read_keys(settings.api_key_file, "--api-key-file")
    else:
        api_keys = [] if settings.api_key is None else [settings.api_key]
    keys = Keys(api_keys, admin_key, is_admins_apart=settings.hide_cache_counts)
    if settings.enable_admin_routes and not keys.has_administrator:
        raise ConfigError(
            "--enable-admin-routes needs an admin key: give --admin-key-file"
            + ("" if settings.hide_cache_counts else ", or a single API key, which then is the admin key")
        )
    return keys


def _only_key(file: str) -> str:
    keys = read_keys(file, "--admin-key-file")
    if len(keys) != 1:
        raise ConfigError(f"--admin-key-file {file} has {len(keys)} keys; it must have one")
    return keys[0]


def read_keys(file: str, flag: str) -> list[str]:
    """Return the keys of a file, one per line. Empty lines are skipped; no message quotes a line.

    Raises:
        ConfigError: The file is not regular, too large, not text, without keys, or has an invalid or repeated key.
    """
    where = f"{flag} {file}"
    keys: list[str] = []
    try:
        text = read_text(file, LARGEST_FILE)
    except ConfigError as error:
        raise ConfigError(f"{flag} {error}; give a file with one key per line") from None
    for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), start=1):  # and at no other line separator
        if not line:
            continue
        problem = "begins with #, and there are no comments" if line.startswith("#") else key_problem(line)
        if problem is not None:
            raise ConfigError(f"{where}, line {number}: a key {problem}")
        if line in keys:
            raise ConfigError(f"{where}, line {number}: the key is listed twice; each key is a separate tenant")
        keys.append(line)
    if not keys:
        raise ConfigError(f"{where} has no key; write one key per line")
    return keys
