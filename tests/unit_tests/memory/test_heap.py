"""Freed memory is kept for the next step, in any thread, and given back where it is measured or where pools go."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from megatron_ext.memory import heap

# Steps of two buffers of 40 MiB, aligned as torch aligns tensors, which glibc would always map by themselves: the page
# faults of the last of them, and what the process then gives back. A stand-in of torch saves its import.
STEPS = """
import ctypes, resource, sys, threading, types
torch = sys.modules["torch"] = types.ModuleType("torch")
torch.cuda = types.SimpleNamespace(is_available=lambda: False)
from megatron_ext.memory import heap
libc = ctypes.CDLL(None)
kept = "keep" in sys.argv and heap.keep_freed_memory()
if "keep" in sys.argv:
    print("kept", kept)
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() >> 20
def step():
    buffers = [ctypes.c_void_p() for _ in range(2)]
    for buffer in buffers:
        assert libc.posix_memalign(ctypes.byref(buffer), ctypes.c_size_t(64), ctypes.c_size_t(40 << 20)) == 0
        libc.memset(buffer, 1, ctypes.c_size_t(40 << 20))
    for buffer in buffers:
        libc.free(buffer)
def steps():
    for _ in range(16 if kept else 2):  # the heap finds its shape
        step()
    before = faults()
    step()
    print("faults", faults() - before)
if "thread" in sys.argv:
    thread = threading.Thread(target=steps)
    thread.start()
    thread.join()
else:
    steps()
held = resident()
heap.give_back_freed_memory()
print("given", held - resident())
"""


def run(*arguments: str, **environment: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name not in heap._CHOSEN}
    command = [sys.executable, "-c", STEPS, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=inherited | environment, timeout=120)
    return dict(line.split() for line in done.stdout.splitlines())


pytestmark = pytest.mark.skipif(heap._glibc() is None, reason="this C library has no such options")
PAGES = 80 << 20 >> 12


def test_a_step_takes_the_pages_of_the_step_before():
    """SC-1: a step reuses the previous step's pages; as a control, without reuse every page is faulted in again."""
    kept = run("keep", "thread")
    assert kept["kept"] == "True"
    assert int(kept["faults"]) < PAGES // 50
    assert int(kept["given"]) > 48, "what is kept goes back when asked for"
    plain = run("thread")
    assert int(plain["faults"]) > PAGES // 2


def test_an_environment_that_says_otherwise_is_heeded():
    assert run("keep", MALLOC_TRIM_THRESHOLD_="4096")["kept"] == "False"
