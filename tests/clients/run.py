"""Run real clients against a server of the embedded model, and print a table of the results.

Each row is a script beside its client's lock file. It plays the agent loop that the client documents, in an environment
that has nothing else than the lock file's packages, and prints facts as JSON; `expected.py` has the expected ones.

    python -m tests.clients.run             # all rows
    python -m tests.clients.run litellm     # the rows whose name contains one of the words
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.clients.expected import FACTS

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
OUT = ROOT / "out/clients"
KEY = "key-of-the-clients"
MODEL = "embedded"
START_SECONDS, SCRIPT_SECONDS, INSTALL_SECONDS = 300, 300, 1200
NODE, NPM = "node", "npm"
STORE = ("--responses-store-mb", "16")


def with_errors(
    model: str = "NotFoundError", length: str = "BadRequestError", **others: object
) -> Mapping[str, object]:
    """Return the facts of a row whose client has these classes of errors; `others` replace facts, None removes one."""
    errors = {"model": f"{model} 404 model_not_found", "length": f"{length} 400 context_length_exceeded"}
    return {name: fact for name, fact in {**FACTS, "errors": errors, **others}.items() if fact is not None}


class ClientError(Exception):
    """A client cannot be installed or run, or reports other facts; the text says why."""


@dataclass(frozen=True)
class Row:
    """One client with one of its interfaces.

    Attributes:
        client: Name in the table.
        folder: Folder of its lock file.
        package: Project whose version the table shows.
        script: Script to run, below this folder.
        mode: Argument of the script.
        facts: Facts that it has to print.
        has_store: Whether its server keeps responses.
    """

    client: str
    folder: str
    package: str
    script: str
    mode: str
    facts: Mapping[str, object] = field(default_factory=with_errors)
    has_store: bool = False

    @property
    def is_node(self) -> bool:
        """Return whether the client runs on Node."""
        return self.script.endswith(".mjs")

    @property
    def name(self) -> str:
        """Return the name of the row."""
        return f"{self.client} {self.mode}" + (" with a store" if self.has_store else "")


AI_SDK = with_errors("AI_APICallError", "AI_APICallError", follow_up=FACTS["parallel"])
LANGCHAIN = with_errors("OpenAIModelNotFoundError", "OpenAIContextOverflowError")
PYDANTIC_AI = with_errors("ModelNotFoundError", "ModelContextWindowExceededError", forced=None)
LITELLM = with_errors(errors={"model": "NotFoundError 404", "length": "ContextWindowExceededError 400"})
OPENCODE = {  # always streamed
    "stream": FACTS["stream"],
    "stream_text": FACTS["stream_text"],
    "follow_up": FACTS["parallel"],
    "errors": {
        "model": "APIError 404 model_not_found",
        "length": "ContextOverflowError undefined context_length_exceeded",
    },
}
CODEX = {  # always streamed; calls of its own tools are not shown
    "stream_text": FACTS["stream_text"],
    "follow_up": FACTS["stream_text"],
    "errors": {"model": "does not exist", "length": "ran out of room"},
}
ANTHROPIC = with_errors(
    counts_agree=True,
    errors={
        "model": "NotFoundError 404 not_found_error",
        "length": "BadRequestError 400 invalid_request_error prompt is too long",
    },
)
ROWS = (
    Row("openai-python", "openai-python/1.109", "openai", "openai-python/chat.py", "chat"),
    Row("openai-python", "openai-python/1.109", "openai", "openai-python/responses.py", "responses"),
    Row("openai-python", "openai-python/3.3", "openai", "openai-python/chat.py", "chat"),
    Row("openai-python", "openai-python/3.3", "openai", "openai-python/responses.py", "responses"),
    Row("openai-python", "openai-python/3.3", "openai", "openai-python/responses.py", "responses", has_store=True),
    Row("openai-node", "openai-node", "openai", "openai-node/chat.mjs", "chat"),
    Row("openai-node", "openai-node", "openai", "openai-node/responses.mjs", "responses"),
    Row("openai-node", "openai-node", "openai", "openai-node/responses.mjs", "responses", has_store=True),
    Row("ai-sdk", "ai-sdk", "@ai-sdk/openai-compatible", "ai-sdk/loop.mjs", "chat", AI_SDK),
    Row("ai-sdk", "ai-sdk", "@ai-sdk/openai", "ai-sdk/loop.mjs", "responses", AI_SDK),
    Row("ai-sdk", "ai-sdk", "@ai-sdk/openai", "ai-sdk/loop.mjs", "responses", AI_SDK, has_store=True),
    Row("langchain-openai", "langchain-openai", "langchain-openai", "langchain-openai/loop.py", "chat", LANGCHAIN),
    Row("langchain-openai", "langchain-openai", "langchain-openai", "langchain-openai/loop.py", "responses", LANGCHAIN),
    Row("pydantic-ai", "pydantic-ai", "pydantic-ai-slim", "pydantic-ai/loop.py", "chat", PYDANTIC_AI),
    Row("pydantic-ai", "pydantic-ai", "pydantic-ai-slim", "pydantic-ai/loop.py", "responses", PYDANTIC_AI),
    Row("openai-agents", "openai-agents", "openai-agents", "openai-agents/loop.py", "responses"),
    Row("openai-agents", "openai-agents", "openai-agents", "openai-agents/loop.py", "chat"),
    Row("litellm", "litellm", "litellm", "litellm/loop.py", "chat", LITELLM),
    Row("opencode", "opencode", "opencode-linux-x64", "opencode/run.mjs", "chat", OPENCODE),
    Row("codex", "codex", "@openai/codex", "codex/exec.mjs", "responses", CODEX),
    Row("anthropic", "anthropic", "anthropic", "anthropic/loop.py", "messages", ANTHROPIC),
)


class Server:
    """Server of the embedded model on a free port.

    Args:
        log: File for its output.
        flags: Flags of `tools/run_server.py`.
    """

    def __init__(self, log: Path, *flags: str) -> None:
        self._log = log
        command = [sys.executable, "-m", "tests.clients.server", "--port", "0", *flags]
        environment = os.environ | {"MEGATRON_EXT_API_KEY": KEY, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        with log.open("w") as out:
            self._process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT)

    def url(self) -> str:
        """Return the address as soon as it listens.

        Raises:
            ClientError: It has ended, or takes too long.
        """
        deadline = time.monotonic() + START_SECONDS
        while True:
            ready = [line for line in self._log.read_text().splitlines() if line.startswith("ready: ")]
            if ready:
                return ready[0].removeprefix("ready: ")
            if self._process.poll() is not None or time.monotonic() > deadline:
                lines = self._log.read_text().splitlines() or ["no output"]
                raise ClientError(f"the server did not start: {lines[-1]}")
            time.sleep(0.1)

    def stop(self) -> None:
        """End the process."""
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def call(command: Sequence[object], log: Path, seconds: float, **options: object) -> None:
    """Run a command with its output in a file.

    Raises:
        ClientError: It fails, or takes too long.
    """
    with log.open("w") as out:
        try:
            done = subprocess.run(
                list(map(str, command)), stdout=out, stderr=subprocess.STDOUT, timeout=seconds, check=False, **options
            )
        except subprocess.TimeoutExpired:
            raise ClientError(f"{log} has not ended after {seconds} s") from None
    if done.returncode:
        lines = log.read_text(errors="replace").strip().splitlines() or ["no output"]
        raise ClientError(f"exit code {done.returncode}: {lines[-1][:300]} (see {log.relative_to(ROOT)})")


def install(row: Row) -> Path:
    """Create the environment of a row unless it is there, from its lock file alone; return its folder.

    Raises:
        ClientError: Node is missing, or the installation fails.
    """
    source, target = HERE / row.folder, OUT / row.folder
    lock = source / ("package-lock.json" if row.is_node else "lock.txt")
    stamp, content = target / ".installed", hashlib.sha256(lock.read_bytes()).hexdigest()
    if row.is_node and not (shutil.which(NODE) and shutil.which(NPM)):
        raise ClientError("NODE IS MISSING: install node (20 or newer) and npm to run this row")
    if stamp.exists() and stamp.read_text() == content:
        return target
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    log = target / "install.log"
    if row.is_node:
        shutil.copy(source / "package.json", target)
        shutil.copy(lock, target)
        call([NPM, "ci", "--ignore-scripts", "--no-audit", "--no-fund"], log, INSTALL_SECONDS, cwd=target)
    else:
        call([sys.executable, "-m", "venv", target / "venv"], log, INSTALL_SECONDS)
        pip = [target / "venv/bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        call([*pip, "--no-compile", "--no-deps", "--require-hashes", "-r", lock], log, INSTALL_SECONDS)
    stamp.write_text(content)
    return target


def version_of(row: Row) -> str:
    """Return the version that a row's lock file has of its package."""
    folder = HERE / row.folder
    if row.is_node:
        packages = json.loads((folder / "package-lock.json").read_text())["packages"]
        return packages[f"node_modules/{row.package}"]["version"]
    lines = (folder / "lock.txt").read_text().splitlines()
    return next(line.split("==")[1].split()[0] for line in lines if line.startswith(f"{row.package}=="))


def run(row: Row, place: Path, url: str) -> dict[str, object]:
    """Run a row's script and return the facts that it prints as its last line.

    Raises:
        ClientError: The script fails, or takes too long.
    """
    script = HERE / row.script
    if row.is_node:  # modules are looked for beside the script
        script = Path(shutil.copy(script, place))
    command = [NODE if row.is_node else place / "venv/bin/python", script, row.mode]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OPENAI_", "ANTHROPIC_"))}
    environment |= {"BASE_URL": url, "API_KEY": KEY, "MODEL": MODEL, "HAS_STORE": "1" if row.has_store else ""}
    environment |= QUIET
    log = place / f"{script.stem}-{row.name.replace(' ', '-')}.log"
    call(command, log, SCRIPT_SECONDS, cwd=place, env=environment)
    return json.loads(log.read_text().splitlines()[-1])


# Neither traces nor price lists: nothing is sent anywhere else than to the server.
QUIET = {
    "AI_SDK_LOG_WARNINGS": "false",
    "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "PYTHONWARNINGS": "ignore",
}


def differences(found: Mapping[str, object], wanted: Mapping[str, object]) -> list[str]:
    """Return a line for each fact that is not as expected."""
    names = [name for name in {**wanted, **found} if found.get(name) != wanted.get(name)]
    return [f"{name}: {json.dumps(found.get(name))}, expected {json.dumps(wanted.get(name))}" for name in names]


def play(row: Row, servers: Mapping[bool, Server]) -> list[str]:
    """Install and run a row; return its differences, or the reason why it does not run."""
    try:
        return differences(run(row, install(row), servers[row.has_store].url()), row.facts)
    except ClientError as error:
        return [str(error)]


def main(argv: Sequence[str]) -> int:
    """Run the rows and print the table; 1 if any of them fails."""
    parser = argparse.ArgumentParser(prog="tests.clients.run", description="Run real clients against a server.")
    parser.add_argument("words", nargs="*", help="run the rows whose name contains one of these; default: all")
    words = parser.parse_args(argv).words
    rows = [row for row in ROWS if not words or any(word in f"{row.name} {row.folder}" for word in words)]
    if not rows:
        parser.error(f"no row has {' or '.join(words)} in its name: {', '.join(row.name for row in ROWS)}")
    OUT.mkdir(parents=True, exist_ok=True)
    servers = {
        kept: Server(OUT / f"server-{kept}.log", *(STORE if kept else ())) for kept in {r.has_store for r in rows}
    }
    failed = 0
    try:
        print(f"{'client':<22} {'version':<10} {'what':<28} result", flush=True)
        for row in rows:
            wrong = play(row, servers)
            failed += bool(wrong)
            what = f"{row.mode}{' with a store' if row.has_store else ''}"
            print(f"{row.client:<22} {version_of(row):<10} {what:<28} {'FAILED' if wrong else 'ok'}", flush=True)
            print(*(f"    {line}\n" for line in wrong), sep="", end="", flush=True)
    finally:
        for server in servers.values():
            server.stop()
    print(f"{len(rows) - failed} of {len(rows)} rows are as expected")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
