"""Measure servers side by side: the same workloads, interleaved within one run, repeated, as JSON lines.

    scripts/bench/compare --set MODEL=FOLDER --set … --only jaxllm-bf16,vllm-bf16 --out results.jsonl
    scripts/bench/compare --read results.jsonl --baseline vllm-bf16 --plot compare.png

Each server is started with empty caches (start-cold, then stopped), again with them (start-warm),
and stays up, idle but for its own turns. Every repetition sends every workload with text of its
own to every server in turn, another server first each time. The second form shows what a file
holds: medians, range, and the ratio to --baseline.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from scripts.bench import usage, workload
from scripts.bench.measure import Doubts, Row, measure, start
from scripts.bench.peer_server import Limit, Peer, PeerServer, load_peers
from scripts.bench.stream_client import run_workload
from scripts.bench.table import read_rows, table
from scripts.bench.words import Texts, whole_words

HERE = Path(__file__).resolve().parent
STARTS = ("start-cold", "start-warm")
_QUIET_WAIT_S = 30.0


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*STARTS, *workload.WORKLOADS]
    parser.add_argument("--peers", type=Path, default=HERE / "peers.json", help="entries of the servers (%(default)s)")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a variable of the entries")
    parser.add_argument("--only", help="entries to measure, comma between; default: all")
    parser.add_argument("--workloads", default=",".join(names), help="what to measure (%(default)s)")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--longest", type=float, default=0, help="what took more seconds is not repeated; 0: all is")
    parser.add_argument("--skip", action="append", default=[], metavar="ENTRY:WORKLOAD", help="leave this out")
    parser.add_argument("--seed", type=int, default=0, help="of the texts of the first repetition")
    parser.add_argument("--tokenizer", help="folder or .gguf file that counts the tokens; default: the default model's")
    parser.add_argument("--rate", type=float, default=workload.ONLINE_RATE, help="of online, requests a second")
    parser.add_argument("--online-seconds", type=float, default=workload.ONLINE_S, help="of arrivals")
    parser.add_argument("--start-timeout", type=float, default=600, help="seconds a server gets to be ready")
    parser.add_argument("--quiet", type=float, default=0.3, help="wait 30 s at most until others use fewer cores")
    parser.add_argument("--max-other-cpu", type=float, default=0.3, help="cores of others that make a row suspect")
    parser.add_argument("--max-lag", type=float, default=0.1, help="seconds of a late client that make a row suspect")
    parser.add_argument("--out", type=Path, default=Path("compare.jsonl"), help="results are added here (%(default)s)")
    parser.add_argument("--work", type=Path, help="folder of logs and caches; default: beside --out")
    parser.add_argument("--read", type=Path, help="measure nothing, show this file")
    parser.add_argument("--baseline", help="entry that the ratios are to; default: the first")
    parser.add_argument("--plot", type=Path, help="write a picture of the results here (needs matplotlib)")
    args = parser.parse_args(argv)
    unknown = set(args.workloads.split(",")) - set(names)
    if unknown:
        parser.error(f"--workloads has {', '.join(sorted(unknown))}; accepted: {', '.join(names)}")
    for each in args.set:
        if "=" not in each:
            parser.error(f"--set {each}; accepted: NAME=VALUE")
    for name in ("rate", "online_seconds", "start_timeout", "repetitions"):
        if not 0 < getattr(args, name) < math.inf:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}; accepted: a number above 0")
    return args


@dataclass(slots=True)
class Comparison:
    """Mutable, owned by `main`: the servers that are up, and where the rows go."""

    args: argparse.Namespace
    peers: list[Peer]
    make_texts: Any  # seed -> Texts
    servers: list[PeerServer] = field(default_factory=list[PeerServer])
    _slow: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])  # (entry, workload) not to repeat

    @property
    def _doubts(self) -> Doubts:
        return Doubts(self.args.max_lag, self.args.max_other_cpu)

    def run(self) -> None:
        wanted = self.args.workloads.split(",")
        self.put({"kind": "run", **machine(), "peers": [asdict(peer) for peer in self.peers], "args": self._arguments})
        try:
            if STARTS[0] in wanted:
                for peer in self.peers:
                    self._start(peer, STARTS[0], keep=False)
            for peer in self.peers:
                self._start(peer, STARTS[1], keep=True, counts=STARTS[1] in wanted)
            for repetition in range(self.args.repetitions):
                for name in wanted:
                    if name in workload.WORKLOADS:
                        self._turn(name, repetition)
        finally:
            for server in self.servers:
                server.stop()

    @property
    def _arguments(self) -> dict[str, str]:
        return {name: str(value) for name, value in vars(self.args).items()}

    def _start(self, peer: Peer, name: str, *, keep: bool, counts: bool = True) -> None:
        """Where an entry has only a url there is nothing to start, and nothing to time."""
        limit = self._limit(peer, name, 0) if peer.command else None
        if not keep and limit is None:
            return
        cache = self.args.work / f"{peer.name}-cache"
        if not keep:
            shutil.rmtree(cache, ignore_errors=True)
        cache.mkdir(parents=True, exist_ok=True)
        if STARTS[0] not in self.args.workloads.split(",") and not any(cache.iterdir()):
            name = STARTS[0]  # nothing is there to be warm
        variables = {**default_variables(), "CACHE": str(cache.absolute()), **given_variables(self.args)}
        server = PeerServer(peer, variables, self.args.work / f"{peer.name}.log")
        first = workload.first_token(self.make_texts(f"{name} {self.args.seed}"))
        self._wait_for_quiet()
        try:
            row = start(server, first, self.args.start_timeout, self._doubts)
        except RuntimeError as error:
            print(f"{peer.name}: {error}", flush=True)
            self.put({"kind": "row", "peer": peer.name, "workload": name, "repetition": 0, "failed": str(error)})
            server.stop()
            return
        except BaseException:  # the comparison ends while this one starts: nobody else knows of it yet
            server.stop()
            raise
        if counts and limit is not None:
            self._row(peer, name, 0, row)
        if keep:
            self.servers.append(server)
            self._warm_up(server)
        else:
            server.stop()

    def _warm_up(self, server: PeerServer) -> None:
        texts = self.make_texts(f"warm-up {self.args.seed}")
        for concurrency in (8, 1):
            limit = 8 if concurrency > 1 else 4
            if server.peer.workloads is None or "offline" in server.peer.workloads or concurrency == 1:
                run_workload(server.target, workload.warm_up(texts, concurrency).first(limit), self.args.start_timeout)

    def _turn(self, name: str, repetition: int) -> None:
        """One workload for each server, the same bytes; who comes first changes with the repetition."""
        make = workload.WORKLOADS[name]
        if name == "online":
            make = partial(workload.online, rate=self.args.rate, seconds=self.args.online_seconds)
        asked = make(self.make_texts(f"{name} {self.args.seed + repetition}"))
        for server, limit in self._in_order(name, repetition):
            self._wait_for_quiet()
            row = measure(server, asked.first(limit.requests), self._doubts)
            self._row(server.peer, name, repetition, row)
            if 0 < self.args.longest < row["wall_s"]:
                self._slow.add((server.name, name))

    def _in_order(self, name: str, repetition: int) -> Iterator[tuple[PeerServer, Limit]]:
        at = repetition % max(len(self.servers), 1)
        for server in self.servers[at:] + self.servers[:at]:
            limit = self._limit(server.peer, name, repetition)
            if limit is not None:
                yield server, limit

    def _limit(self, peer: Peer, name: str, repetition: int) -> Limit | None:
        if (peer.name, name) in self._slow or f"{peer.name}:{name}" in self.args.skip:
            return None
        return peer.limit(name, repetition)

    def _wait_for_quiet(self) -> None:
        deadline = time.monotonic() + _QUIET_WAIT_S
        while self.args.quiet and time.monotonic() < deadline:
            before = usage.Clocks.read(None)
            time.sleep(0.5)
            if usage.Clocks.read(None).busy_s - before.busy_s < 0.5 * self.args.quiet:
                return

    def _row(self, peer: Peer, name: str, repetition: int, row: Row) -> None:
        self.put({"kind": "row", "peer": peer.name, "workload": name, "repetition": repetition, **row})
        doubt = f"  suspect: {'; '.join(row['suspect'])}" if row["suspect"] else ""
        print(f"{time.strftime('%H:%M:%S')} {name} {repetition} {peer.name}: {row['wall_s']:.1f} s{doubt}", flush=True)

    def put(self, row: Row) -> None:
        with self.args.out.open("a") as file:
            file.write(json.dumps(row) + "\n")


def default_variables() -> dict[str, str]:
    cores = os.cpu_count() or 1
    return {"PYTHON": sys.executable, "THREADS": str(cores), "CORES": f"0-{cores - 1}"}


def given_variables(args: argparse.Namespace) -> dict[str, str]:
    return dict(each.split("=", 1) for each in args.set)


def machine() -> Row:
    cpu = next((line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")), "")
    return {
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
        "cpu": cpu,
        "cores": psutil.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": platform.platform(),
    }


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []


def make_texts_of(tokenizer_path: str | None) -> Any:
    """The maker of texts for a seed, whatever the seed is made of; the words are looked up once."""
    from jaxllm.config.checkpoint import resolve_model
    from jaxllm.tokenizer.load import load_tokenizer

    tokenizer: Any = load_tokenizer(Path(tokenizer_path) if tokenizer_path else resolve_model(None))
    words = whole_words(tokenizer)
    return lambda seed: Texts(tokenizer, words, seed)


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # end in the ordinary way: servers are stopped
    try:
        if args.read is None:
            args.work = args.work or args.out.with_suffix("")
            peers = load_peers(args.peers, args.only.split(",") if args.only else None)
            for peer in peers:  # a variable that is missing is told of before anything is written
                peer.filled({"PORT": "0", "CACHE": "", **default_variables(), **given_variables(args)})
            args.work.mkdir(parents=True, exist_ok=True)
            Comparison(args, peers, make_texts_of(args.tokenizer)).run()
        rows = read_rows(args.read or args.out)
        print(table(rows, args.baseline), end="")
        if args.plot:
            from scripts.bench.plot import plot

            plot(rows, args.baseline, args.plot)
    except (ValueError, OSError) as error:
        raise SystemExit(f"compare: {error}") from error
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
