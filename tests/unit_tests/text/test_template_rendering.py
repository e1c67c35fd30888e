"""SE-9: a chat template that recurses, runs on or grows without end is one line, and the next conversation is rendered.

What templates make of conversations is compared with transformers in `test_chat_template`.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from megatron_ext.errors import CheckpointError, ConfigError
from megatron_ext.text import template_rendering
from megatron_ext.text.template_rendering import TemplateProcess, TemplateRenderer
from megatron_ext.text.template_worker import LONGEST_TEXT, Rendering
from tests.unit_tests.support.source import ROOT

MESSAGES: list[dict[str, object]] = [{"role": "user", "content": "Hello"}]
OPTIONS = {"tools": None, "add_generation_prompt": True, "continue_final_message": False}
PLAIN = Rendering("{{ messages[0].content }}!", MESSAGES, OPTIONS)
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"

TOO_SLOW, TOO_MUCH, BROKEN = "0.2 s of CPU time", "MB", "the chat template is broken"
VIOLATIONS = {
    "nested loops": (ENDLESS, TOO_SLOW),
    "one call that allocates": ("{{ messages[0].content * 10 ** 12 }}", TOO_MUCH),
    "a long text": (f"{{{{ messages[0].content * {LONGEST_TEXT // 5 + 1} }}}}", "more than 64 MB"),
    # From a variable: Jinja would write a constant into the code that it compiles, which takes most of the CPU time.
    "a long text in bytes": (f"{{% set sign = '\u20ac' %}}{{{{ sign * {LONGEST_TEXT // 3 + 1} }}}}", "more than 64 MB"),
    "a macro that calls itself": ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "recurses"),
    "nested brackets": ("{{ " + "(" * 9999 + "1" + ")" * 9999 + " }}", ""),
    "nested blocks": ("{% for i in [1] %}" * 30 + "{% endfor %}" * 30, BROKEN),
    "a long range": ("{% for i in range(10 ** 9) %}{% endfor %}", "refuses"),
}


class Watched(TemplateRenderer):
    """Notes which processes are used."""

    def __init__(self) -> None:
        super().__init__()
        self.used: list[int] = []
        self.has_begun = threading.Event()

    def _running(self, process: TemplateProcess | None) -> TemplateProcess:
        process = super()._running(process)
        self.used.append(process.pid)
        self.has_begun.set()
        return process


@pytest.fixture(scope="module")
def shared() -> Iterator[Watched]:
    """Renderer for all templates: none of them leaves it unfit for the next."""
    one = Watched()
    yield one
    one.close()


@pytest.fixture
def watched(shared) -> Watched:
    """The renderer, which forgets what other tests have used."""
    shared.used.clear()
    shared.has_begun.clear()
    return shared


@pytest.mark.parametrize("name", VIOLATIONS)
def test_one_line_and_the_next_one_is_rendered(watched, name):
    template, said = VIOLATIONS[name]
    with pytest.raises(CheckpointError) as caught:
        watched.render(dataclasses.replace(PLAIN, template=template, cpu_seconds=0.2 if said is TOO_SLOW else 60.0))
    words = str(caught.value)
    assert "chat template" in words
    assert said in words
    assert len(words.splitlines()) == 1
    assert len(words) < 300
    assert watched.render(PLAIN) == "Hello!"


def test_an_answer_above_the_limit_is_not_read(watched, monkeypatch):
    """SE-9: a process that sends more than it may, as foreign code in it could, is killed and replaced."""
    monkeypatch.setattr(template_rendering, "LONGEST_TEXT", 3)
    with pytest.raises(CheckpointError, match="ended with signal 9"):
        watched.render(PLAIN)
    monkeypatch.undo()
    assert watched.render(PLAIN) == "Hello!"
    assert len(set(watched.used)) == 2


def test_a_process_that_does_not_start_is_tried_again(monkeypatch):
    def fail() -> TemplateProcess:
        raise BlockingIOError("no more processes")

    renderer = TemplateRenderer()
    monkeypatch.setattr(template_rendering, "TemplateProcess", fail)
    for _ in range(2 * template_rendering.MOST):
        with pytest.raises(BlockingIOError):
            renderer.start()
    monkeypatch.undo()
    assert renderer.render(PLAIN) == "Hello!"
    renderer.close()


def test_one_process_serves_until_a_template_breaks_it(watched):
    for _ in range(3):
        assert watched.render(PLAIN) == "Hello!"
    with pytest.raises(ConfigError, match="refuses the messages: no"):
        watched.render(dataclasses.replace(PLAIN, template="{{ raise_exception('no') }}"))
    assert watched.render(PLAIN) == "Hello!"
    assert len(set(watched.used)) == 1
    os.kill(watched.used[-1], signal.SIGKILL)
    psutil.wait_procs([psutil.Process(watched.used[-1])])
    assert watched.render(PLAIN) == "Hello!", "one that was killed while it was idle is replaced"
    assert len(set(watched.used)) == 2


def test_a_slow_conversation_delays_no_other(watched):
    """Others use other processes; one that is killed is an error that says so."""
    with ThreadPoolExecutor() as threads:
        slow = threads.submit(watched.render, dataclasses.replace(PLAIN, template=ENDLESS, cpu_seconds=999.0))
        assert watched.has_begun.wait(60)
        first = watched.used[0]
        assert watched.render(PLAIN) == watched.render(PLAIN) == "Hello!"
        assert not slow.done()
        os.kill(first, signal.SIGKILL)
        with pytest.raises(CheckpointError, match=r"ended with signal 9 \(SIGKILL\)"):
            slow.result(60)
    assert first not in watched.used[1:]


def test_an_exchange_that_is_interrupted_is_not_continued(watched, monkeypatch):
    """The answer to a question that was given up would be taken for that to the next one."""
    ask = TemplateProcess._ask

    def interrupted(self, request):
        ask(self, request)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(TemplateProcess, "_ask", interrupted)
        with pytest.raises(KeyboardInterrupt):
            watched.render(PLAIN)
    assert not psutil.pid_exists(watched.used[0])
    assert watched.render(PLAIN) == "Hello!"


def test_unserializable_messages_are_refused(watched):
    nested: list[object] = []
    for _ in range(10**4):
        nested = [nested]
    with pytest.raises(ConfigError, match="nested too deeply"):
        watched.render(dataclasses.replace(PLAIN, variables={"x": nested}))
    with pytest.raises(ConfigError, match="must be JSON data"):
        watched.render(dataclasses.replace(PLAIN, variables={"x": lambda: 0}))


@pytest.mark.parametrize("end", ["pass", "os.kill(os.getpid(), 9)"], ids=["in order", "killed"])
def test_processes_end_with_their_parent(end):
    code = f"""
import os
from megatron_ext.text.template_rendering import RENDERER
RENDERER.start()
print(RENDERER._idle.queue[-1].pid, flush=True)
{end}
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    try:
        process = psutil.Process(int(done.stdout))
    except psutil.NoSuchProcess:
        return
    process.wait(60)
