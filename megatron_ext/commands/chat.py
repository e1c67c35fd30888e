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
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from megatron_ext.console.terminal import Output, printable, report_error
from megatron_ext.errors import ConfigError
from megatron_ext.http_client import opened, reason_of
from megatron_ext.server.api_keys import API_KEY_VARIABLE

PROGRAM = "megatron-ext chat"
DONE, INTERRUPTED = 0, 130
SERVE = (sys.executable, "-m", "megatron_ext", "serve")
PROMPT = "> "
_READY = "ready: "
_TIMEOUT = 600.0  # seconds between two parts of an answer


def main(argv: Sequence[str] | None = None, *, program: str = PROGRAM) -> int:
    """Hold a conversation until the end of standard input.

    Returns:
        Exit code: 0 done, 2 bad usage, 130 ended by Ctrl-C at the start, or the code of a server that could not start.
    """
    parser = argparse.ArgumentParser(
        prog=program, usage="%(prog)s [DIR | --url URL] [--system TEXT] [FLAG of serve ...]", description=__doc__
    )
    parser.add_argument("--url", help=f"running server, as http://127.0.0.1:8000; {API_KEY_VARIABLE} is its key")
    parser.add_argument("--system", metavar="TEXT", help="system message of the conversation")
    arguments, of_server = parser.parse_known_args(argv)
    if arguments.url is not None and of_server:
        parser.error(f"with --url no server is started; leave {' '.join(of_server)} out")
    output = Output(sys.stdout)
    try:
        with contextlib.ExitStack() as started:
            if arguments.url is None:
                server = started.enter_context(_Server(of_server))
                if server.url is None:
                    output.write("".join(server.said))
                    return server.code
                chat = Chat(server.url, server.key, arguments.system)
            else:
                chat = Chat(arguments.url, os.environ.get(API_KEY_VARIABLE), arguments.system)
            converse(chat, output)
    except ConfigError as error:
        return report_error(program, error)
    except KeyboardInterrupt:
        return INTERRUPTED
    return DONE


class _Server:
    """Server in a process of its own, on a free port of the loopback address; it ends with the context.

    Args:
        flags: Flags of `megatron-ext serve`, and the model's folder.

    Attributes:
        url: Address; None if it could not start.
        said: Lines of its output before the address; the answer to a user if it does not start, as with `--dry-run`.
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
        self.url: str | None = None
        self.said: list[str] = []
        try:
            for line in self._process.stdout:
                if line.startswith(_READY):
                    self.url = line.removeprefix(_READY).rstrip()
                    break
                self.said.append(line)
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

    Attributes:
        usage: Usage of the last answer, as the server counts it; empty if an answer was ended early.

    Raises:
        ConfigError: The server does not answer.
    """

    def __init__(self, url: str, key: str | None, system: str | None = None) -> None:
        self._opened = partial(opened, url, key=key, flag="--url", timeout=_TIMEOUT)
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
        with self._opened("/v1/chat/completions", body=body) as answer:
            try:
                for event in _events(answer):
                    self.usage = event.get("usage") or self.usage
                    for choice in event["choices"]:
                        said.append(choice["delta"].get("content") or "")
                        yield (choice["delta"].get("reasoning_content") or "") + said[-1]
            finally:
                self._messages += [question, {"role": "assistant", "content": "".join(said)}]


def _events(answer: http.client.HTTPResponse) -> Iterator[Mapping[str, Any]]:
    """Yield the objects of a stream of events.

    Raises:
        ConfigError: The stream ends with an error.
    """
    for line in answer:
        name, _, data = line.decode().partition(":")
        if name != "data" or data.strip() == "[DONE]":
            continue
        if "error" in (event := json.loads(data)):
            raise ConfigError(f"the server ended the answer: {reason_of(data.encode())}")
        yield event


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
