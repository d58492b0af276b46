"""What a simulation was like for its users, and what it cost. All times are seconds of the simulation's clock."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxllm.errors import ConfigError, shown
from jaxllm.sim.replica import Counts, Served
from jaxllm.sim.section import Section, is_number
from jaxllm.sim.simulator import Run
from jaxllm.types.request import FinishReason

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
_FINISHED = (FinishReason.STOP, FinishReason.LENGTH)
_TARGETS = ("ttft_s", "tpot_s", "e2e_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """What counts as served well; None: no target. A target that a request carries itself goes before these.

    Raises:
        ConfigError: a target is no time above 0.
    """

    ttft_s: float | None = None  # from arrival to the first token
    tpot_s: float | None = None  # a token after the first, on average
    e2e_s: float | None = None  # from arrival to the end

    def __post_init__(self) -> None:
        for name in _TARGETS:
            value = getattr(self, name)
            if value is not None and not (is_number(value) and value > 0):
                raise ConfigError(f"{name}={shown(value)}; accepted: seconds, above 0")


def make_slo(spec: Mapping[str, Any], where: str) -> Slo:
    """From a section of a configuration; `where` says which file and section.

    Raises:
        ConfigError: an unknown target, or one that is no time above 0.
    """
    section = Section(spec, where)
    targets = {name: section.number(name, None, above=0) for name in _TARGETS}
    section.done()
    return Slo(**targets)


@dataclass(frozen=True, slots=True)
class Spread:
    """Many values as four; NaN where there was none. Percentiles lie between values in proportion, as numpy's."""

    mean: float
    p50: float
    p90: float
    p99: float

    @staticmethod
    def of(values: Floats) -> Spread:
        kept = values[~np.isnan(values)]
        if not kept.size:
            return Spread(math.nan, math.nan, math.nan, math.nan)
        return Spread(float(kept.mean()), *map(float, np.percentile(kept, (50, 90, 99))))


@dataclass(frozen=True, slots=True)
class TenantSummary:
    """One tenant's part of a run. `tenant` None: requests that name none."""

    tenant: str | None
    num_requests: int
    num_finished: int
    num_refused: int
    served_tokens: int  # prompt and output tokens of its requests that got a first token
    shared_tokens: float  # of those, served while every tenant had something to be served; see `Summary.jain`
    slo_share: float  # requests that met all targets, 0 to 1
    ttft_s: Spread
    tpot_s: Spread
    e2e_s: Spread


@dataclass(frozen=True, slots=True)
class Summary:
    """One run. A request has *finished* if it ended with its last token: not refused, not ended at a deadline."""

    policy: str
    seed: int
    num_requests: int
    num_finished: int
    num_refused: int  # ended with an error; most often not taken in at all
    num_retries: int  # of requests whose replica failed
    duration_s: float  # from 0 to the last token
    output_tokens_per_s: float  # of all requests, over the duration
    requests_per_s: float  # finished ones, over the duration
    ttft_s: Spread  # time to first token: from arrival; like the next four, of finished requests
    tpot_s: Spread  # time per output token after the first: (last - first) / (tokens - 1); answers of two or more
    e2e_s: Spread  # from arrival to the end
    queue_s: Spread  # from arrival until a step first had some of its tokens
    longest_gap_s: Spread  # the longest time between two tokens of an answer; answers of two or more
    goodput_req_per_s: float  # finished requests that met all of their targets, over the duration
    slo_share: float  # the same, as a share of all requests
    jain: float
    """Jain's index of the tokens served to each tenant: 1 is equal, 1 / tenants is all to one.

    Prompt tokens count when the first token comes, output tokens evenly between the first and the last.
    What is counted are the tokens served until some tenant's last request has ended. Afterwards there is
    nothing left to share with that tenant, and a run that serves everything in the end has served each tenant
    what it asked for, whatever the policy.
    """
    preemptions: int
    recomputed_tokens: int
    """Tokens computed beyond what was needed once.

    Needed for an answer are the prompt tokens that were not found in the prefix cache and every output token
    but the last. So this is work done again after preemptions and failures, and work on requests that ended
    before their first token.
    """
    kv_waste: float  # of the token slots in pages that requests held, the share without a token in it
    kv_usage: float  # share of all pages that requests held, mean of the steps that were looked at
    kv_peak: float  # and the largest
    prefix_hit_rate: float  # of tokens at first admission, the share found in the prefix cache
    device_busy: float  # of the seconds that devices were there, the share in which they worked
    replica_s: float  # those seconds: replicas times the time each was there
    num_steps: int
    num_row_steps: int  # requests, summed over steps
    plan_hash: str | None  # the same for the same sequence of plans
    tenants: tuple[TenantSummary, ...]  # by name

    def as_dict(self) -> dict[str, Any]:
        """For JSON, which has no NaN: None instead."""
        return _without_nan(asdict(self))


@dataclass(frozen=True, slots=True)
class Outcome:
    """A run and its figures."""

    summary: Summary
    run: Run


def summarise(run: Run, slo: Slo | None, policy: str, seed: int, *, plan_hash: str | None = None) -> Summary:
    """Figures of a run. Without any target, every request that finished counts as served well."""
    columns = columns_of(run.served)
    is_good = _meets_targets(run.served, columns, slo or Slo())
    tenants = _tenants(run.served, columns, is_good)
    held, used = (sum(getattr(counts.slots, name) for counts in run.counts) for name in ("held", "used"))
    usage = np.array([sample.kv_usage for counts in run.counts for sample in counts.samples])
    num_good, num_finished = int(is_good.sum()), int(columns.is_finished.sum())
    return Summary(
        policy=policy,
        seed=seed,
        num_requests=len(run.served),
        num_finished=num_finished,
        num_refused=sum(served.error is not None for served in run.served),
        num_retries=sum(served.num_retries for served in run.served),
        duration_s=run.duration_s,
        output_tokens_per_s=_ratio(float(columns.num_output.sum()), run.duration_s),
        requests_per_s=_ratio(num_finished, run.duration_s),
        ttft_s=Spread.of(columns.ttft_s),
        tpot_s=Spread.of(columns.tpot_s),
        e2e_s=Spread.of(columns.e2e_s),
        queue_s=Spread.of(columns.queue_s),
        longest_gap_s=Spread.of(columns.longest_gap_s),
        goodput_req_per_s=_ratio(num_good, run.duration_s),
        slo_share=_ratio(num_good, len(run.served)),
        jain=jain([tenant.shared_tokens for tenant in tenants]),
        preemptions=run.num_preemptions,
        recomputed_tokens=max(0, run.num_computed_tokens - _num_needed(run.served)),
        kv_waste=1 - used / held if held else 0.0,
        kv_usage=float(usage.mean()) if usage.size else 0.0,
        kv_peak=float(usage.max()) if usage.size else 0.0,
        prefix_hit_rate=_ratio(run.prefix_hits, run.prefix_queries),
        device_busy=_ratio(run.busy_s, run.replica_s),
        replica_s=run.replica_s,
        num_steps=_total(run.counts, "num_steps"),
        num_row_steps=_total(run.counts, "num_row_steps"),
        plan_hash=plan_hash,
        tenants=tenants,
    )


def jain(amounts: Sequence[float]) -> float:
    """Jain, Chiu and Hawe (1984): (sum x)^2 / (n sum x^2); 1 where nobody was given anything."""
    squares = math.fsum(amount * amount for amount in amounts)
    return math.fsum(amounts) ** 2 / (len(amounts) * squares) if squares else 1.0


@dataclass(frozen=True, slots=True)
class Columns:
    """Requests as arrays; NaN where a time never came, and latencies of finished requests alone."""

    is_finished: Bools
    at_s: Floats
    scheduled_s: Floats
    first_s: Floats
    last_s: Floats
    end_s: Floats
    num_prompt: Floats
    num_output: Floats
    ttft_s: Floats
    tpot_s: Floats
    e2e_s: Floats
    queue_s: Floats
    longest_gap_s: Floats


def columns_of(requests: Sequence[Served]) -> Columns:
    at_s, first_s = _floats([r.arrival.at_s for r in requests]), _floats([r.first_s for r in requests])
    last_s, end_s = _floats([r.last_s for r in requests]), _floats([r.end_s for r in requests])
    scheduled_s, num_output = _floats([r.scheduled_s for r in requests]), _floats([r.num_output for r in requests])
    is_finished = np.array([r.error is None and r.reason in _FINISHED for r in requests], dtype=np.bool_)
    is_finished &= ~np.isnan(first_s)
    has_gaps = is_finished & (num_output > 1)
    return Columns(
        is_finished=is_finished,
        at_s=at_s,
        scheduled_s=scheduled_s,
        first_s=first_s,
        last_s=last_s,
        end_s=end_s,
        num_prompt=_floats([r.arrival.num_prompt for r in requests]),
        num_output=num_output,
        ttft_s=np.where(is_finished, first_s - at_s, np.nan),
        tpot_s=np.where(has_gaps, (last_s - first_s) / np.maximum(num_output - 1, 1), np.nan),
        e2e_s=np.where(is_finished, end_s - at_s, np.nan),
        queue_s=np.where(is_finished, scheduled_s - at_s, np.nan),
        longest_gap_s=np.where(has_gaps, _floats([r.longest_gap_s for r in requests]), np.nan),
    )


def _floats(values: Sequence[float | None]) -> Floats:
    return np.array(values, dtype=np.float64)  # None becomes NaN


def _meets_targets(requests: Sequence[Served], columns: Columns, slo: Slo) -> Bools:
    services = [request.arrival.service for request in requests]
    ttft = _floats([slo.ttft_s if s.ttft_target_s is None else s.ttft_target_s for s in services])
    tpot = _floats([slo.tpot_s if s.tpot_target_s is None else s.tpot_target_s for s in services])
    misses = (columns.ttft_s > ttft) | (columns.tpot_s > tpot)  # False beside NaN: no target, no value
    if slo.e2e_s is not None:
        misses |= columns.e2e_s > slo.e2e_s
    return columns.is_finished & ~misses


def _tenants(requests: Sequence[Served], columns: Columns, is_good: Bools) -> tuple[TenantSummary, ...]:
    places: dict[str | None, list[int]] = {}
    for place, request in enumerate(requests):
        places.setdefault(request.arrival.service.tenant, []).append(place)
    by_tenant = {tenant: np.array(places[tenant]) for tenant in sorted(places, key=lambda t: (t is not None, t or ""))}
    served = np.where(np.isnan(columns.first_s), 0.0, columns.num_prompt + columns.num_output)
    through_s = min(
        (float(columns.end_s[each].max()) for each in by_tenant.values() if served[each].any()), default=math.inf
    )
    shared = _served_until(columns, through_s)
    return tuple(
        TenantSummary(
            tenant,
            num_requests=len(each),
            num_finished=int(columns.is_finished[each].sum()),
            num_refused=sum(requests[place].error is not None for place in each),
            served_tokens=int(served[each].sum()),
            shared_tokens=float(shared[each].sum()),
            slo_share=float(is_good[each].mean()),
            ttft_s=Spread.of(columns.ttft_s[each]),
            tpot_s=Spread.of(columns.tpot_s[each]),
            e2e_s=Spread.of(columns.e2e_s[each]),
        )
        for tenant, each in by_tenant.items()
    )


def _served_until(columns: Columns, until_s: float) -> Floats:
    """Prompt and output tokens of each request by a moment."""
    took_s = columns.last_s - columns.first_s
    passed = np.clip((until_s - columns.first_s) / np.where(took_s > 0, took_s, 1.0), 0.0, 1.0)
    later = np.where(took_s > 0, passed, 1.0) * (columns.num_output - 1)  # those after the first
    return np.where(columns.first_s <= until_s, columns.num_prompt + 1 + later, 0.0)


def _num_needed(requests: Sequence[Served]) -> int:
    answered = (request for request in requests if request.first_s is not None)
    return sum(r.arrival.num_prompt - r.num_hits + r.num_output - 1 for r in answered)


def _total(counts: Sequence[Counts], name: str) -> int:
    return sum(getattr(each, name) for each in counts)


def _ratio(amount: float, of: float) -> float:
    return amount / of if of else 0.0


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(each) for each in value]
    return None if isinstance(value, float) and math.isnan(value) else value
