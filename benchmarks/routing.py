"""RP-7: the router that serves before a fleet that is simulated, beside other rules: the tables of docs/routing.md.

Run: `python -m benchmarks.routing` (`--quick` sees that all of it runs; `--replicas 256 --requests 1000000
--rules longest_prefix` for one run at length; `--decisions` for the speed of decisions alone). Times of requests are
simulated and do not depend on the machine; decisions are measured in seconds of CPU of one thread.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from array import array
from pathlib import Path

from benchmarks.fleet.balancers import BALANCERS, Balancer, Ours
from benchmarks.fleet.plots import bars
from benchmarks.fleet.world import Outcome, Scale, World
from megatron_ext.config.routing import RoutingConfig
from megatron_ext.routing.router import Router

FLEETS = (16, 256, 4096)
IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"


def main() -> None:
    """Run what is asked for and print it; a line of JSON for each run to `--output`."""
    arguments = parse()
    if arguments.decisions or arguments.quick:
        decisions(200 if arguments.quick else 4000)
    if arguments.decisions:
        return
    requests = 1500 if arguments.quick else arguments.requests
    fleets = (16, 64) if arguments.quick else arguments.replicas
    rows = []
    for replicas in fleets:
        for name in arguments.rules:
            rows.append(measure(name, Scale(replicas, requests, offered=arguments.offered), arguments.alpha))
            print(line(rows[-1]), flush=True)
            if arguments.output:
                with open(arguments.output, "a", encoding="utf-8") as stream:
                    stream.write(json.dumps(rows[-1]) + "\n")
    if arguments.plot:
        plot(rows, arguments.plot)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, nargs="+", default=FLEETS)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--rules", nargs="+", choices=sorted(BALANCERS), default=list(BALANCERS))
    parser.add_argument("--alpha", type=float, default=0.5, help="of longest_prefix")
    parser.add_argument("--offered", type=float, default=2.0, help="prompt tokens over what could be computed uncached")
    parser.add_argument("--output", help="a file that JSON lines are added to")
    parser.add_argument("--plot", type=Path, help="a directory for plots")
    parser.add_argument("--decisions", action="store_true", help="only how fast decisions are")
    parser.add_argument("--quick", action="store_true", help="see that everything runs")
    return parser.parse_args()


def measure(name: str, scale: Scale, alpha: float = 0.5) -> dict[str, float | str]:
    """Return one run as a row."""
    kind = BALANCERS[name]
    balancer: Balancer = kind(scale.replicas, alpha) if kind is Ours else kind(scale.replicas)
    began = time.perf_counter()
    outcome = World(scale, balancer).run()
    row = {"rule": name, "alpha": alpha, "replicas": scale.replicas, "requests": len(outcome.firsts)}
    row |= {"offered": scale.offered, "skipped": outcome.skipped, "imbalance": outcome.imbalance}
    row |= {"retried": outcome.retried, "simulated_seconds": outcome.seconds, **percentiles(outcome)}
    row |= {
        "decisions_per_cpu_second": len(outcome.firsts) / outcome.choosing,
        "requests_per_cpu_second": len(outcome.firsts) / outcome.all_told,
        "megabytes": footprint(balancer) / 2**20,
        "wall_seconds": time.perf_counter() - began,
    }
    return row


def percentiles(outcome: Outcome) -> dict[str, float]:
    """Percentiles of the waiting time and of the time to the first token."""
    found = {}
    for name, values in (("wait", outcome.waits), ("ttft", outcome.firsts)):
        values = sorted(values)
        found |= {f"{name}_p{p}": values[min(len(values) - 1, len(values) * p // 100)] for p in (50, 99)}
    return found


def footprint(balancer: Balancer) -> int:
    """Bytes of everything that a balancer has."""
    seen, left, total = {id(balancer.random)}, [balancer], 0
    while left:
        one = left.pop()
        if id(one) in seen or isinstance(one, type) or callable(one):
            continue
        seen.add(id(one))
        total += sys.getsizeof(one)
        if isinstance(one, dict):
            left += one.keys()
            left += one.values()
        elif isinstance(one, list | tuple | set):
            left += one
        elif hasattr(one, "__dict__"):
            left.append(vars(one))
    return total


def line(row: dict) -> str:
    """A row for people."""
    shares = f"skipped {100 * row['skipped']:5.1f} %, imbalance {row['imbalance']:.2f}"
    waits = f"waits {row['wait_p50']:.3f} / {row['wait_p99']:.2f} s"
    firsts = f"first token {row['ttft_p50']:.3f} / {row['ttft_p99']:.2f} s"
    speed = f"{row['decisions_per_cpu_second']:,.0f} decisions/s, {row['requests_per_cpu_second']:,.0f} requests/s"
    sizes = f"{row['megabytes']:.0f} MB, {row['wall_seconds']:.0f} s"
    head = f"{row['rule']:>15} x{row['replicas']:<5} {row['requests']:>8} requests"
    return f"{head}: {shares}, {waits}, {firsts}, {speed}, {sizes}"


def plot(rows: list[dict], folder: Path) -> None:
    """Plot the skipped tokens and the waiting times."""
    fleets = sorted({row["replicas"] for row in rows})
    rules = list(dict.fromkeys(row["rule"] for row in rows))
    values = {(row["rule"], row["replicas"]): row for row in rows}

    def series(key: str, factor: float = 1.0) -> dict[str, list[float]]:
        return {rule: [factor * values[rule, fleet][key] for fleet in fleets] for rule in rules}

    groups = [f"{fleet:,} replicas" for fleet in fleets]
    bars(folder / "routing_skipped.svg", "Prompt tokens skipped, %", groups, series("skipped", 100))
    title = "Seconds to the first token, 99th percentile (simulated)"
    bars(folder / "routing_first_token.svg", title, groups, series("ttft_p99"), logarithmic=True)
    title = "The most that a replica computed, over the mean"
    bars(folder / "routing_imbalance.svg", title, groups, series("imbalance"))


def decisions(count: int) -> None:
    """Print the router's decisions a second: 64 replicas, blocks of 16 tokens, by the number of known prefixes."""
    for blocks in (4, 64, 512):
        for families in (50, 500):
            print(speed(blocks, families, count), flush=True)


def speed(blocks: int, families: int, count: int, replicas: int = 64, size: int = 16) -> str:
    """Decisions a second of CPU: alone, with hashing, and with all that a request's life tells the router.

    A family of prompts shares a quarter with others; three replicas hold up to all of it, and 256 requests are in
    flight.
    """
    draw = random.Random(0)
    router = Router(RoutingConfig())
    for i in range(replicas):
        router.join(str(i), size)
    openings = [array("I", (draw.randrange(2**17) for _ in range(blocks // 4 * size))) for _ in range(8)]
    tokens = []
    for family in range(families):
        rest = array("I", (draw.randrange(2**17) for _ in range((blocks - blocks // 4) * size)))
        tokens.append(openings[family % 8] + rest)
        for replica in draw.sample(range(replicas), 3):
            depth = draw.randint(blocks // 4, blocks)
            names = [(family % 8, i) if i < blocks // 4 else (family, i, "") for i in range(depth)]
            router.stored(str(replica), names, None, tokens[-1][: depth * size])
    known = sum(view.blocks for view in router.replicas())
    prompts = [tokens[draw.randrange(families)] for _ in range(count)]
    hashing = choosing = life = 0.0
    for i in range(0, count, 50):
        a = time.thread_time()
        batch = [router.prompt(one) for one in prompts[i : i + 50]]
        for one in batch:
            one.keys(size)
        b = time.thread_time()
        chosen = [router.route(one) for one in batch]
        c = time.thread_time()
        for j, (prompt, decision) in enumerate(zip(batch, chosen, strict=True), start=i):
            router.began(j, decision, prompt, 100)
            if j >= 256:
                router.ended(j - 256)
        hashing, choosing, life = hashing + b - a, choosing + c - b, life + time.thread_time() - c
    total = hashing + choosing
    return (
        f"{blocks:>4} blocks, {known:>8,} known: {count / choosing:>9,.0f} decisions/s, {count / total:>9,.0f} with "
        f"hashing, {count / (total + life):>9,.0f} with the request's beginning and end"
    )


if __name__ == "__main__":
    main()
