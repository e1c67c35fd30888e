"""Command `chat`: a conversation in the terminal, with a server of its own or with a running one.

Each answer is followed by the tokens of its turn: cached and computed ones of the prompt, and generated ones. Ctrl-C
ends an answer, Ctrl-D the conversation. Flags of `megatron-ext serve` are for the server that is started.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import secrets
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron_ext.console.terminal import Output, printable
from megatron_ext.errors import ConfigError
from megatron_ext.server.api_keys import API_KEY_VARIABLE

PROGRAM = "megatron-ext chat"
DONE, BAD_USAGE = 0, 2
SERVE = (sys.executable, "-m", "megatron_ext", "serve")
PROMPT = "> "
_READY = "ready: "
_TIMEOUT = 600.0  # seconds between two parts of an answer
_LONGEST_ERROR = 2**16  # bytes


def main(argv: Sequence[str] | None = None, *, program: str = PROGRAM) -> int:
    """Hold a conversation until the end of standard input.

    Returns:
        Exit code: 0 done, 2 bad usage, or the code of a server that could not start.
    """
    parser = argparse.ArgumentParser(
        prog=program, usage="%(prog)s [DIR | --url URL] [--system TEXT] [FLAG of serve ...]", description=__doc__
    )
    parser.add_argument("--url", help=f"running server, as http://127.0.0.1:8000; {API_KEY_VARIABLE} is its key")
    parser.add_argument("--system", metavar="TEXT", help="system message of the conversation")
    arguments, of_server = parser.parse_known_args(argv)
    if arguments.url is not None and of_server:
        parser.error(f"with --url no server is started, so {' '.join(of_server)} would do nothing; leave it out")
    output = Output(sys.stdout)
    try:
        with contextlib.ExitStack() as started:
            if arguments.url is None:
                server = started.enter_context(_Server(of_server))
                if server.url is None:
                    return server.code
                chat = Chat(server.url, server.key, arguments.system)
            else:
                chat = Chat(arguments.url, os.environ.get(API_KEY_VARIABLE), arguments.system)
            converse(chat, output)
    except ConfigError as error:
        print(f"{program}: error: {printable(str(error))}", file=sys.stderr)
        return BAD_USAGE
    return DONE


class _Server:
    """Server in a process of its own, on a free port of the loopback address; it ends with the context.

    Args:
        flags: Flags of `megatron-ext serve`, and the model's folder.

    Attributes:
        url: Address; None if it could not start.
        key: API key, which other users of this machine do not know.
    """

    def __init__(self, flags: Sequence[str]) -> None:
        self.key = os.environ.get(API_KEY_VARIABLE) or secrets.token_urlsafe()
        # In a session of its own, so that Ctrl-C ends an answer and not the server.
        self._process = subprocess.Popen(
            [*SERVE, "--log-level", "warning", "--host", "127.0.0.1", "--port", "0", *flags],
            env=os.environ | {API_KEY_VARIABLE: self.key},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._process.stdout is not None, "it is a pipe"
        lines = (line.rstrip() for line in self._process.stdout)
        try:
            self.url = next((line.removeprefix(_READY) for line in lines if line.startswith(_READY)), None)
        except BaseException:
            self._process.kill()
            raise

    @property
    def code(self) -> int:
        """Exit code of a server that could not start."""
        return self._process.wait()

    def __enter__(self) -> _Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait()


class Chat:
    """Conversation with a server that speaks OpenAI's API.

    Args:
        url: Address of the server, without a path.
        key: API key, or None.
        system: System message, or None.

    Attributes:
        usage: Usage of the last answer, as the server counts it; empty if an answer was ended early.

    Raises:
        ConfigError: The server does not answer.
    """

    def __init__(self, url: str, key: str | None, system: str | None = None) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"--url {url} is not an address; give one such as http://127.0.0.1:8000")
        self._url, self._key = url.rstrip("/"), key
        self._messages = [] if system is None else [{"role": "system", "content": system}]
        self.usage: Mapping[str, Any] = {}
        with self._opened("/v1/models") as answer:
            self._model = str(json.load(answer)["data"][0]["id"])

    def ask(self, text: str) -> Iterator[str]:
        """Yield the parts of an answer; the conversation then has the question, and as much as came of the answer.

        Raises:
            ConfigError: The server refuses or does not answer, and the conversation is as before; or it ends the answer
                with an error.
        """
        said: list[str] = []
        question = {"role": "user", "content": text}
        self.usage = {}
        body = {
            "model": self._model,
            "messages": [*self._messages, question],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        with self._opened("/v1/chat/completions", body) as answer:
            try:
                for event in _events(answer):
                    self.usage = event.get("usage") or self.usage
                    for choice in event["choices"]:
                        said.append(choice["delta"].get("content") or "")
                        yield (choice["delta"].get("reasoning_content") or "") + said[-1]
            finally:
                self._messages += [question, {"role": "assistant", "content": "".join(said)}]

    def _opened(self, path: str, body: Mapping[str, object] | None = None) -> http.client.HTTPResponse:
        headers = {"Content-Type": "application/json"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self._url + path, data, headers)
            answer: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=_TIMEOUT)
        except urllib.error.HTTPError as error:
            with error:
                raise ConfigError(f"{self._url}: {_reason(error.read(_LONGEST_ERROR)) or error}") from error
        except (OSError, http.client.HTTPException) as error:
            raise ConfigError(f"{self._url} does not answer: {error}") from error
        return answer


def _events(answer: http.client.HTTPResponse) -> Iterator[Mapping[str, Any]]:
    """Yield the objects of a stream of events.

    Raises:
        ConfigError: The stream ends early, or with an error.
    """
    try:
        for line in answer:
            name, _, data = line.decode().partition(":")
            if name != "data" or data.strip() == "[DONE]":
                continue
            if "error" in (event := json.loads(data)):
                raise ConfigError(f"the server ended the answer: {_reason(data.encode())}")
            yield event
    except (OSError, http.client.HTTPException) as error:
        raise ConfigError(f"the answer was cut: {error}") from error


def _reason(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return body[:200].decode(errors="replace")


def converse(chat: Chat, output: Output) -> None:
    """Read questions from standard input until its end, and print the answers."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # lines can be edited
    while True:
        try:
            text = input(PROMPT if sys.stdin.isatty() else "")
        except (EOFError, KeyboardInterrupt):
            output.write("\n")
            return
        if text.strip():
            _answer(chat, text, output)
            output.flush()


def _answer(chat: Chat, text: str, output: Output) -> None:
    """Print an answer, which Ctrl-C ends, and its counts of tokens."""
    parts = chat.ask(text)
    try:
        for part in parts:
            output.write(_safe(part))
            output.flush()
    except KeyboardInterrupt:
        parts.close()  # type: ignore[attr-defined]  # a generator
    except ConfigError as error:
        output.write(f"\n[{printable(str(error))}]\n")
        return
    output.write(f"\n{_tokens(chat.usage)}\n")


def _safe(text: str) -> str:
    """Return a text with its lines, in which control characters are spelled out."""
    return "".join(part if part in ("\n", "\t", " ") else printable(part) for part in text)


def _tokens(usage: Mapping[str, Any]) -> str:
    if not usage:
        return "[ended]"
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    prompt, generated = usage["prompt_tokens"], usage["completion_tokens"]
    if cached is None:  # the server hides them
        return f"[{prompt} tokens of prompt, {generated} generated]"
    return f"[{cached} tokens cached, {prompt - cached} computed, {generated} generated]"
