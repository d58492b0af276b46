"""Many replicas behind a router, in windows of the time between two load reports."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import islice
from typing import Literal, overload

from jaxllm.errors import ConfigError, JaxLLMError
from jaxllm.sim.cost import CostModel
from jaxllm.sim.executor import any_token
from jaxllm.sim.host import Ended, Host, HostProcess, LocalHost, Report, Totals, Window
from jaxllm.sim.replica import EngineSetup, Served
from jaxllm.sim.router import ROUTERS, Load, Router
from jaxllm.sim.simulator import Run
from jaxllm.sim.workload import Arrival, Workload, check_time
from jaxllm.types.request import FinishReason

Role = Literal["whole", "prefill", "decode"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Autoscale:
    """Replicas come and go with the requests that wait or run on each, looked at with every report."""

    most: int
    least: int = 1
    high: float = 32.0  # open requests a replica above which one more is started
    low: float = 8.0  # below which one takes no more and goes when it is done
    startup_s: float = 60.0
    cooldown_s: float = 30.0  # between two changes


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Replicas that are alike."""

    name: str
    setup: EngineSetup
    cost: CostModel
    num_replicas: int
    role: Role = "whole"  # or one half of each request: its prompt, or its output
    router: str = "least_loaded"
    autoscale: Autoscale | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """How the KV of a prompt gets from a prefill to a decode replica."""

    bytes_per_token: float
    bytes_per_s: float
    latency_s: float = 0.0

    def seconds(self, num_tokens: int) -> float:
        return self.latency_s + num_tokens * self.bytes_per_token / self.bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A replica that loses all it has. What it did not finish is sent elsewhere, from the beginning."""

    at_s: float
    replica: int
    down_s: float = math.inf  # until it is there again, empty


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSetup:
    """Raises ConfigError: pools that do not make a fleet."""

    pools: tuple[Pool, ...]
    report_s: float = 0.1  # between two load reports
    transfer: Transfer | None = None
    failures: tuple[Failure, ...] = ()
    seed: int = 0  # of routers

    def __post_init__(self) -> None:
        roles = sorted(pool.role for pool in self.pools)
        if roles != ["decode", "prefill"] and set(roles) != {"whole"}:
            raise ConfigError(f"pools of roles {roles}; accepted: whole ones alone, or one prefill and one decode pool")
        if self.report_s <= 0:
            raise ConfigError(f"report_s={self.report_s!r}; accepted: seconds, above 0")
        for pool in self.pools:
            if pool.router not in ROUTERS:
                raise ConfigError(f"router={pool.router!r}; accepted: {', '.join(ROUTERS)}")
            if pool.num_replicas < 1:
                raise ConfigError(f"num_replicas={pool.num_replicas!r} of pool {pool.name!r}; accepted: at least 1")
        routers = sorted({pool.router for pool in self.pools})
        if self.first_role == "whole" and len(routers) > 1:
            raise ConfigError(
                f"whole pools have routers {', '.join(routers)}; accepted: the same, since one router serves them"
            )
        num_known = sum(pool.num_replicas for pool in self.pools)
        for failure in self.failures:  # replicas that come under load have numbers too
            if failure.replica >= num_known and not any(pool.autoscale for pool in self.pools):
                raise ConfigError(f"failures: replica={failure.replica}; accepted: 0 to {num_known - 1}")

    @property
    def first_role(self) -> Role:
        """Of the replicas that a request comes to first."""
        return "whole" if self.pools[0].role == "whole" else "prefill"


@dataclass(slots=True)
class _Member:
    """A replica as the fleet knows it."""

    number: int
    pool: int
    start_s: float  # when it takes requests
    load: Load
    is_draining: bool = False


@dataclass(slots=True)
class _Journey:
    """A request on its way through the fleet."""

    arrival: Arrival
    num_retries: int = 0
    prefill: Ended | None = None  # its first half, where there are two


@dataclass(slots=True)
class FleetState:
    """All that a fleet knows between two windows, its replicas apart: picklable."""

    workload: Workload
    window: int = 0  # the next
    num_taken: int = 0  # of the requests that come whatever happens
    members: dict[int, _Member] = field(default_factory=dict[int, _Member])
    routers: list[Router] = field(default_factory=list[Router])
    next_number: int = 0
    coming: list[tuple[float, int, Role, Arrival]] = field(default_factory=list[tuple[float, int, Role, Arrival]])
    num_pushed: int = 0
    journeys: dict[str, _Journey] = field(default_factory=dict[str, _Journey])
    served: list[Served] = field(default_factory=list[Served])
    changed_s: list[float] = field(default_factory=list[float])  # by pool, when it was last scaled
    failures: list[Failure] = field(default_factory=list[Failure])
    restarts: list[tuple[float, int, int]] = field(default_factory=list[tuple[float, int, int]])  # (at, number, pool)
    gone: list[Totals] = field(default_factory=list[Totals])
    replica_s: float = 0.0  # of replicas that are gone
    end_s: float = 0.0


class Fleet:
    """Runs a fleet. Mutable; used once.

    In each window, first the router sends every request that comes in it to a replica, by reports from the
    end of the window before and by what it sent since; then all replicas run to the end of the window, each
    by itself; then what ended is taken in, in the order of time. So nothing depends on how many processes
    share the replicas. What follows from an end (the next turn of a chat, the second half of a request that is
    split, a retry) is sent at the beginning of the next window at the earliest, and waits until then.
    """

    def __init__(self, setup: FleetSetup, workload: Workload, *, num_workers: int = 1, look_every: int = 16) -> None:
        self._setup = setup
        kinds = [(replace(pool.setup, loads_kv=pool.role == "decode"), pool.cost) for pool in setup.pools]
        hosts = [Host(kinds, look_every) for _ in range(num_workers)]
        self._hosts: list[LocalHost | HostProcess] = (
            [LocalHost(hosts[0])] if num_workers == 1 else [HostProcess(host) for host in hosts]
        )
        self.state = FleetState(workload, failures=sorted(setup.failures, key=lambda failure: failure.at_s))
        self.state.routers = [ROUTERS[pool.router](setup.seed + i) for i, pool in enumerate(setup.pools)]
        self.state.changed_s = [-math.inf] * len(setup.pools)
        self._steady: Iterator[Arrival] = iter(())
        self._next_steady: Arrival | None = None

    def start(self) -> None:
        for index, pool in enumerate(self._setup.pools):
            for _ in range(pool.num_replicas):
                self._start_replica(index, 0.0)
        self._read_workload()

    def resume(self, dumped: tuple[FleetState, Sequence[bytes]]) -> None:
        """Go on from what `dump` gave, with as many workers as then."""
        self.state, replicas = dumped
        for host, content in zip(self._hosts, replicas, strict=True):
            host.send("load", content)
            host.answer()
        self._read_workload()

    def dump(self) -> tuple[FleetState, list[bytes]]:
        for host in self._hosts:
            host.send("dump")
        return self.state, [host.answer() for host in self._hosts]

    def advance(self) -> bool:
        """One window; False, and nothing happens, if nothing is left to do."""
        state = self.state
        if not self._skip_idle():
            return False
        start_s, end_s = state.window * self._setup.report_s, (state.window + 1) * self._setup.report_s
        self._fail(start_s, end_s)
        put = self._route(start_s, end_s)
        for host, share in zip(self._hosts, self._shares(put), strict=True):
            host.send("run", share, end_s)
        windows: list[Window] = [host.answer() for host in self._hosts]
        self._take_in(windows, end_s)
        self._scale(end_s)
        state.window += 1
        return True

    def finish(self) -> Run:
        """Totals of all replicas; ends the processes."""
        state, totals = self.state, list(self.state.gone)
        for host in self._hosts:
            host.send("totals")
        by_number: dict[int, Totals] = {}
        for host in self._hosts:
            by_number.update(host.answer())
            host.close()
        totals += [by_number[number] for number in sorted(by_number)]
        alive_s = sum(max(0.0, state.end_s - member.start_s) for member in state.members.values())
        return Run(
            state.served,
            state.end_s,
            tuple(each.counts for each in totals),
            sum(each.num_preemptions for each in totals),
            sum(each.num_computed_tokens for each in totals),
            sum(each.busy_s for each in totals),
            sum(each.prefix_queries for each in totals),
            sum(each.prefix_hits for each in totals),
            replica_s=state.replica_s + alive_s,
            plan_hash=blake2b(b"".join(each.plan_hash for each in totals), digest_size=16).hexdigest(),
        )

    # Requests

    def _read_workload(self) -> None:
        self._steady = islice(iter(self.state.workload.start()), self.state.num_taken, None)
        self._next_steady = next(self._steady, None)

    def _push(self, at_s: float, stage: Role, arrival: Arrival) -> None:
        """`stage`: which half of the request comes, or all of it."""
        state = self.state
        check_time(arrival.request_id, at_s)
        state.num_pushed += 1
        heapq.heappush(state.coming, (at_s, state.num_pushed, stage, arrival))

    def _take_steady(self, end_s: float) -> None:
        while self._next_steady is not None and self._next_steady.at_s < end_s:
            self._push(self._next_steady.at_s, self._setup.first_role, self._next_steady)
            self.state.num_taken += 1
            self._next_steady = next(self._steady, None)

    def _skip_idle(self) -> bool:
        """Go to the next window in which something happens; False if there is none."""
        state = self.state
        if state.journeys:
            return True
        next_s = min(
            state.coming[0][0] if state.coming else math.inf,
            math.inf if self._next_steady is None else self._next_steady.at_s,
        )
        if next_s == math.inf:
            return False
        if self._setup.failures or any(pool.autoscale for pool in self._setup.pools):
            return True  # something may happen in windows without a request too
        state.window = max(state.window, int(next_s / self._setup.report_s))
        return True

    def _route(self, start_s: float, end_s: float) -> dict[int, list[Arrival]]:
        self._take_steady(end_s)
        state, put = self.state, dict[int, list[Arrival]]()
        while state.coming and state.coming[0][0] < end_s:
            at_s, _, stage, arrival = heapq.heappop(state.coming)
            candidates = [m for m in state.members.values() if self._takes(m, stage, start_s)]
            if not candidates:  # all are down, or still starting
                self._check_hope(stage, start_s)
                self._push(end_s, stage, arrival)
                break
            loads = [member.load for member in candidates]
            load = state.routers[candidates[0].pool].choose(arrival, loads)
            load.num_sent += 1
            state.journeys.setdefault(arrival.request_id, _Journey(arrival))
            put.setdefault(load.number, []).append(self._part(arrival, stage, max(at_s, start_s)))
        return put

    def _takes(self, member: _Member, stage: Role, now_s: float) -> bool:
        return self._setup.pools[member.pool].role == stage and member.start_s <= now_s and not member.is_draining

    def _check_hope(self, stage: Role, now_s: float) -> None:
        state, pools = self.state, self._setup.pools
        numbers = [m.pool for m in state.members.values() if m.start_s > now_s] + [pool for *_, pool in state.restarts]
        numbers += [index for index, pool in enumerate(pools) if pool.autoscale is not None]
        if not any(pools[pool].role == stage for pool in numbers):
            raise JaxLLMError(f"at {now_s:.3f} s no {stage} replica is left, and none will come; requests wait")

    def _part(self, arrival: Arrival, stage: Role, at_s: float) -> Arrival:
        """What of a request a replica is sent. Its deadline and age are those of the whole."""
        if stage == "prefill":
            return replace(arrival, at_s=at_s, num_output=1)
        if stage == "decode":
            first = any_token(arrival.request_id, arrival.num_prompt)
            return replace(
                arrival, at_s=at_s, prompt_ids=(*arrival.prompt_ids, first), num_output=arrival.num_output - 1
            )
        return replace(arrival, at_s=at_s)

    def _shares(self, put: Mapping[int, list[Arrival]]) -> list[dict[int, list[Arrival]]]:
        shares: list[dict[int, list[Arrival]]] = [{} for _ in self._hosts]
        for number, arrivals in put.items():
            shares[number % len(self._hosts)][number] = arrivals
        return shares

    # What happened

    def _take_in(self, windows: Iterable[Window], end_s: float) -> None:
        reports: list[Report] = []
        ended: list[Ended] = []
        for window in windows:
            reports += window.reports
            ended += window.ended
        for member in self.state.members.values():
            member.load.num_sent = 0
        for report in reports:
            load = self.state.members[report.replica].load
            load.num_open, load.kv_usage = report.num_open, report.kv_usage
        for end in sorted(ended, key=lambda end: (end.end_s, end.replica, end.request_id)):
            self._note(end)

    def _note(self, end: Ended) -> None:
        state = self.state
        journey = state.journeys[end.request_id]
        arrival = journey.arrival
        state.end_s = max(state.end_s, end.end_s)
        is_prefill = self._setup.pools[state.members[end.replica].pool].role == "prefill"
        if is_prefill and end.reason is FinishReason.LENGTH and arrival.num_output > 1:
            journey.prefill = end
            transfer_s = 0.0 if self._setup.transfer is None else self._setup.transfer.seconds(arrival.num_prompt)
            self._push(end.end_s + transfer_s, "decode", arrival)
            return
        del state.journeys[end.request_id]
        served = _served(journey, end)
        state.served.append(served)
        following = state.workload.ended(arrival, end.end_s, _Answer(arrival, served.num_output))
        for next_arrival in following:
            self._push(next_arrival.at_s, self._setup.first_role, next_arrival)

    # Replicas

    def _start_replica(self, pool: int, start_s: float, number: int | None = None) -> None:
        state = self.state
        if number is None:
            number, state.next_number = state.next_number, state.next_number + 1
        state.members[number] = _Member(number, pool, start_s, Load(number))
        host = self._hosts[number % len(self._hosts)]
        host.send("start", number, pool, start_s)
        host.answer()

    def _stop_replica(self, number: int, at_s: float) -> list[Arrival]:
        state = self.state
        member = state.members.pop(number)
        host = self._hosts[number % len(self._hosts)]
        host.send("stop", number)
        totals, left = host.answer()
        state.gone.append(totals)
        state.replica_s += max(0.0, at_s - member.start_s)
        return left

    def _fail(self, start_s: float, end_s: float) -> None:
        """Replicas that fail in this window are gone from its beginning on."""
        state = self.state
        while state.restarts and state.restarts[0][0] < end_s:
            at_s, number, pool = heapq.heappop(state.restarts)
            self._start_replica(pool, at_s, number)
        while state.failures and state.failures[0].at_s < end_s:
            failure = state.failures.pop(0)
            member = state.members.get(failure.replica)
            if member is None:
                continue  # gone already
            for part in self._stop_replica(failure.replica, failure.at_s):
                journey = state.journeys[part.request_id]
                journey.num_retries += 1
                journey.prefill = None
                self._push(max(start_s, failure.at_s), self._setup.first_role, journey.arrival)
            if failure.down_s < math.inf:
                heapq.heappush(state.restarts, (failure.at_s + failure.down_s, failure.replica, member.pool))

    def _scale(self, now_s: float) -> None:
        state = self.state
        for index, pool in enumerate(self._setup.pools):
            rules = pool.autoscale
            if rules is None:
                continue
            members = [m for m in state.members.values() if m.pool == index]
            for member in [m for m in members if m.is_draining and m.load.known == 0]:
                self._stop_replica(member.number, now_s)
            taking = [m for m in members if not m.is_draining]
            coming = sum(each == index for *_, each in state.restarts)
            if len(taking) + coming < rules.least:  # some have failed for good
                self._start_replica(index, now_s + rules.startup_s)
                continue
            if not taking or now_s - state.changed_s[index] < rules.cooldown_s:
                continue
            mean = sum(m.load.known for m in taking) / len(taking)
            if mean > rules.high and len(taking) < rules.most:
                self._start_replica(index, now_s + rules.startup_s)
            elif mean < rules.low and len(taking) > rules.least:
                max(taking, key=lambda m: m.number).is_draining = True
            else:
                continue
            state.changed_s[index] = now_s


def run_fleet(setup: FleetSetup, workload: Workload, *, num_workers: int = 1, look_every: int = 16) -> Run:
    """From the first request to the last."""
    fleet = Fleet(setup, workload, num_workers=num_workers, look_every=look_every)
    fleet.start()
    while fleet.advance():
        pass
    return fleet.finish()


class _Answer(Sequence[int]):
    """The tokens that a request was answered with, made when somebody looks."""

    def __init__(self, arrival: Arrival, num: int) -> None:
        self._arrival = arrival
        self._num = num

    def __len__(self) -> int:
        return self._num

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._num))]
        if not -self._num <= index < self._num:
            raise IndexError(index)
        return any_token(self._arrival.request_id, self._arrival.num_prompt + index % self._num)


def _served(journey: _Journey, end: Ended) -> Served:
    """Both halves of a request as one."""
    first = journey.prefill or end
    num_output, longest_gap_s = end.num_output, end.longest_gap_s
    if journey.prefill is not None:
        num_output += journey.prefill.num_output
        if end.first_s is not None and first.last_s is not None:
            longest_gap_s = max(longest_gap_s, end.first_s - first.last_s)
    return Served(
        journey.arrival.without_prompt(),
        replica=end.replica,
        scheduled_s=first.scheduled_s,
        first_s=first.first_s,
        last_s=end.last_s,
        num_output=num_output,
        num_hits=first.num_hits,
        longest_gap_s=longest_gap_s,
        end_s=end.end_s,
        reason=end.reason,
        error=end.error,
        num_retries=journey.num_retries,
    )
