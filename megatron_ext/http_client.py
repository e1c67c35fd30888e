"""Requests to a running server, by the standard library."""

from __future__ import annotations

import contextlib
import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping

from megatron_ext.errors import ConfigError

_LONGEST_ERROR = 2**16  # bytes


@contextlib.contextmanager
def opened(
    url: str, path: str, *, key: str | None, flag: str, timeout: float, body: Mapping[str, object] | None = None
) -> Iterator[http.client.HTTPResponse]:
    """Send a request, and hold its answer open.

    Args:
        url: Address of the server.
        path: Route.
        key: API key, or None.
        flag: Flag that gives the address, for messages.
        timeout: Seconds between two parts of the answer.
        body: Object to post; None to get.

    Raises:
        ConfigError: The server does not answer or refuses; or the block cannot read the answer.
    """
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{flag} {url} is not an address; give one such as http://127.0.0.1:8000")
    address = url.rstrip("/") + path
    headers = {"Content-Type": "application/json"} | ({} if key is None else {"Authorization": f"Bearer {key}"})
    try:
        request = urllib.request.Request(address, None if body is None else json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            yield answer
    except ConfigError:
        raise
    except urllib.error.HTTPError as error:
        with error:
            reason = reason_of(error.read(_LONGEST_ERROR))
        raise ConfigError(f"{address} answers {error.code}: {reason}") from error
    except (OSError, http.client.HTTPException) as error:
        raise ConfigError(f"{address} does not answer: {getattr(error, 'reason', error)}") from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"{url} does not answer like a server of this package: {error!r}") from error


def reason_of(body: bytes) -> str:
    """Return the message in the body of an error of OpenAI's API; of another body the beginning."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return body[:200].decode(errors="replace")
