"""Processes that use a store and are killed at random moments: `python -m` this module SEED COUNT, prints counts.

Each kill hits a child that is forked from this process, which has imported the store and nothing else. It comes after a
number of actions, and a little later than these; a child that is not killed by then waits after a few more actions, so
it does as much on a busy machine as on another.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import sys
import time
from pathlib import Path

from megatron_ext.prefix_cache.disk.store import open_directory_store
from tests.unit_tests.prefix_cache.disk.lives import IDENTITY, LIMIT, fast_directory, faults, is_read, live

LONGEST_LIFE = 150  # actions
LONGEST_DELAY = 0.001  # seconds, as long as some actions take
MORE = 5  # actions, of which a kill hits one


def killed_life(directory: Path, seed: int, actions: int, delay: float) -> None:
    """Run a life in a child, and kill it `delay` seconds after so many of its actions."""
    done, child_end = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(done)
            store = open_directory_store(directory, IDENTITY, LIMIT)
            live(store, seed, actions + MORE, lambda: os.write(child_end, b"."))
            waiting = select.poll()
            waiting.register(child_end, 0)
            waiting.poll()  # for the kill, or for the end of the parent
        finally:  # an error of the child is an exit code, which the parent notices
            os._exit(3)
    os.close(child_end)
    for _ in range(actions):
        assert os.read(done, 1) == b".", "the child ended by itself"
    time.sleep(delay)
    os.kill(child, signal.SIGKILL)
    os.close(done)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), "the child ended by itself"


def run(seed: int, kills: int) -> dict[str, int]:
    """Kill so many lives, on one directory; after each every entry is read."""
    rng = random.Random(seed)
    counts = {"kills": 0, "read": 0, "lost": 0}
    with fast_directory() as folder:
        directory = Path(folder, "cache")
        for _ in range(kills):
            life, actions = rng.randrange(2**32), rng.randrange(1, LONGEST_LIFE)
            killed_life(directory, life, actions, rng.random() * LONGEST_DELAY)
            store = open_directory_store(directory, IDENTITY, LIMIT)
            read = [is_read(store, entry.key) for entry in store.entries()]
            assert all(read), "an entry that is listed cannot be read"
            assert not faults(store), f"damaged entries: {store.drops}"
            assert store.use.is_on, store.problem
            store.check()
            store.close()
            assert [path.name for path in directory.glob("slot-*")] == ["slot-0"], "a killed process holds its slot"
            counts["kills"] += 1
            counts["read"] += len(read)
            counts["lost"] += not read
    return counts


if __name__ == "__main__":
    assert not {"torch", "numpy"} & set(sys.modules), "the store alone"
    print(json.dumps(run(int(sys.argv[1]), int(sys.argv[2]))))
