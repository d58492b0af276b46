"""One measurement: a workload sent to a server, as a row of plain numbers."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxllm.bench.load import LoadRun
from scripts.bench import usage
from scripts.bench.peer_server import PeerServer
from scripts.bench.stream_client import run_workload
from scripts.bench.workload import Workload

Row = dict[str, Any]
_TIMEOUT_S = 600.0


_JUDGED_S = 0.5  # processor time comes in hundredths of a second: of a shorter run they say nothing


@dataclass(frozen=True, slots=True)
class Doubts:
    """From where on a row is marked suspect."""

    lag_s: float = 0.1  # the client was late by so much
    other_cpu: float = 0.3  # cores that neither the server nor the client used, stolen ones included

    def of(self, row: Row) -> list[str]:
        reasons = []
        if row.get("max_lag_s", 0.0) > self.lag_s:
            reasons.append(f"the client was {row['max_lag_s']:.2f} s late")
        other = (row.get("other_cpu") or 0.0) + row.get("stolen_cpu", 0.0)
        if other > self.other_cpu and row.get("wall_s", _JUDGED_S) >= _JUDGED_S:
            reasons.append(f"others used {other:.2f} cores")
        if row.get("errors"):
            reasons.append("requests failed")
        elif row.get("output_tokens") != row.get("wanted_tokens"):
            reasons.append(f"{row['output_tokens']} tokens came, {row['wanted_tokens']} were asked for")
        return reasons


def measure(server: PeerServer, workload: Workload, doubts: Doubts) -> Row:
    """Run `workload` and say how it went. Seconds and tokens a second; memory in MiB, read after the run."""
    pid = server.pid
    before = usage.Clocks.read(pid)
    run = run_workload(server.target, workload, _TIMEOUT_S)
    after = usage.Clocks.read(pid)
    row = {**_amounts(run), **_latencies(run), **_shares(run, before, after), **_memory(pid)}
    return {**row, "suspect": doubts.of(row)}


def start(server: PeerServer, first: Workload, timeout_s: float, doubts: Doubts) -> Row:
    """Start a server and ask for a token: from no process to the first token.

    Raises:
        RuntimeError: it does not start, or does not answer.
    """
    before, start_s = usage.Clocks.read(None), time.perf_counter()
    ready_s = server.start(timeout_s)
    run = run_workload(server.target, first, _TIMEOUT_S)
    answer = run.answers[0]
    wall_s = time.perf_counter() - start_s
    if answer.error:
        raise RuntimeError(f"{server.name} is ready and does not answer: {answer.error}")
    after = usage.Clocks.read(server.pid)
    server_s = after.server_s
    row: Row = {
        "wall_s": wall_s,
        "ready_s": ready_s,
        "first_token_s": wall_s - run.duration_s + answer.chunk_times[0] - run.start_s,
        "server_cpu_s": server_s,
        "other_cpu": None if server_s is None else (after.busy_s - before.busy_s - server_s) / wall_s,
        "stolen_cpu": (after.stolen_s - before.stolen_s) / wall_s,
        **_memory(server.pid),
    }
    return {**row, "suspect": doubts.of(row)}


def _amounts(run: LoadRun) -> Row:
    good = [answer for answer in run.answers if not answer.error]
    prompt_tokens = sum(answer.prompt_tokens for answer in good)
    output_tokens = sum(answer.output_tokens for answer in good)
    return {
        "wall_s": run.duration_s,
        "requests": len(run.answers),
        "errors": sorted({answer.error for answer in run.answers if answer.error})[:3],
        "num_errors": len(run.answers) - len(good),
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "wanted_tokens": sum(answer.request.max_tokens for answer in run.answers),
        "chunks": sum(len(answer.chunk_times) for answer in good),
        "output_tok_s": output_tokens / run.duration_s,
        "total_tok_s": (prompt_tokens + output_tokens) / run.duration_s,
    }


def _latencies(run: LoadRun) -> Row:
    """TTFT: to the first chunk with text. ITL: between such chunks. TPOT: a request's mean time a token after it."""
    good = [answer for answer in run.answers if not answer.error]
    itl = [gap for answer in good for gap in answer.itl_s]
    return {
        **_spread("ttft", [answer.ttft_s for answer in good]),
        **_spread("itl", itl),
        **_spread("tpot", [answer.tpot_s for answer in good if answer.tpot_s is not None]),
        "bundled": sum(gap < 0.001 for gap in itl) / len(itl) if itl else None,  # chunks that came together
    }


def _spread(name: str, values: list[float]) -> Row:
    if not values:
        return {f"{name}_{kind}_s": None for kind in ("mean", "p50", "p99")}
    p50, p99 = np.percentile(values, (50, 99))
    return {f"{name}_mean_s": float(np.mean(values)), f"{name}_p50_s": float(p50), f"{name}_p99_s": float(p99)}


def _shares(run: LoadRun, before: usage.Clocks, after: usage.Clocks) -> Row:
    """CPU seconds of the server, of the client, and the cores that all others used meanwhile."""
    busy_s, stolen_s = after.busy_s - before.busy_s, after.stolen_s - before.stolen_s
    server_s = None
    if before.server_s is not None and after.server_s is not None:
        server_s = after.server_s - before.server_s
    return {
        "server_cpu_s": server_s,
        "client_cpu_s": run.client_cpu_s,
        "other_cpu": None if server_s is None else max(busy_s - server_s - run.client_cpu_s, 0.0) / run.duration_s,
        "stolen_cpu": stolen_s / run.duration_s,
        "max_lag_s": max(run.lags_s),
    }


def _memory(pid: int | None) -> Row:
    if pid is None:
        return {"peak_rss_mib": None, "pss_mib": None}
    return {"peak_rss_mib": usage.peak_rss_mib(pid), "pss_mib": usage.pss_mib(pid)}
