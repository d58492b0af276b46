"""What the host costs, without a model: the scheduler by running requests, and how busy a device is kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from jaxllm.bench.host import (
    BusyShare,
    PrefixCacheCost,
    SchedulerCost,
    Spread,
    device_busy_share,
    prefix_cache_cost,
    scheduler_cost,
)
from jaxllm.bench.tables import Row
from jaxllm.config.fields import check_settings, parse_count, setting
from jaxllm.errors import ConfigError
from jaxllm.scheduler.registry import BUILT_IN, create_policy

_MOST_RUNNING = 16_384


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerArgs:
    """Raises: ConfigError: a value has the wrong type or is out of range."""

    num_running: str = setting("128,256,1024", "running decode requests, between commas")
    num_steps: int = setting(200, "steps of a measurement", human=True)
    num_runs: int = setting(5, "measurements of each figure", human=True)
    device_ms: float = setting(5.0, "milliseconds that the pretended device takes a step; 0: leave that part out")
    device_requests: int = setting(128, "running requests on the pretended device", human=True)
    policies: str = setting("", "also the cost with these scheduling policies, between commas, or all")
    num_waiting: int = setting(256, "requests that wait meanwhile, where policies are compared", human=True)
    prefix_cache: bool = setting(False, "also measure what prefix caching costs where nothing is found")

    def __post_init__(self) -> None:
        check_settings(self)
        for name in ("num_steps", "num_runs", "device_requests"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}; accepted: at least 1")
        if not 0 <= self.device_ms <= 10_000:
            raise ConfigError(f"device_ms={self.device_ms}; accepted: 0 to 10000")
        if self.num_steps > 3_000:
            raise ConfigError(f"num_steps={self.num_steps}; accepted: at most 3000, the length of a request here")
        if not 0 <= self.num_waiting <= _MOST_RUNNING:
            raise ConfigError(f"num_waiting={self.num_waiting}; accepted: 0 to {_MOST_RUNNING}")
        for name in self.policy_names:
            create_policy(name)
        _ = self.counts

    @property
    def policy_names(self) -> tuple[str, ...]:
        """fcfs and those that are compared with it; empty if none is."""
        words = [word.strip() for word in self.policies.split(",")]
        asked = [name for word in words if word for name in (BUILT_IN if word == "all" else (word,))]
        return tuple(dict.fromkeys(("fcfs", *asked))) if asked else ()

    @property
    def counts(self) -> tuple[int, ...]:
        found = tuple(parse_count(word) for word in self.num_running.split(","))
        for count in found:
            if not 1 <= count <= _MOST_RUNNING:
                raise ConfigError(f"num_running holds {count}; accepted: 1 to {_MOST_RUNNING}")
        return found


@dataclass(frozen=True, slots=True)
class PolicyCost:
    """What a policy makes of the first number of running requests, with and without others that wait."""

    policy: str
    alone: SchedulerCost
    beside_waiting: SchedulerCost


@dataclass(frozen=True, slots=True)
class SchedulerResult:
    costs: tuple[SchedulerCost, ...]
    policies: tuple[PolicyCost, ...]  # fcfs first; empty if none was asked for
    busy: tuple[BusyShare, ...]  # with and without the overlap of steps
    prefix_cache: PrefixCacheCost | None

    def rows(self) -> list[Row]:
        """CPU time of a step by running requests."""
        heading = ("running", "schedule us", "update us", "both us", "both us a request")
        return [
            heading,
            *(
                (
                    f"{cost.num_requests}",
                    *map(_spread_text, (cost.schedule_us, cost.update_us, cost.total_us)),
                    f"{cost.total_us.median / cost.num_requests:.3f}",
                )
                for cost in self.costs
            ),
        ]

    def policy_rows(self) -> list[Row]:
        if not self.policies:
            return []
        fcfs = self.policies[0]
        rows: list[Row] = [("policy", "both us, none waits", "to fcfs", "both us, others wait", "to fcfs")]
        for cost in self.policies:
            pairs = ((cost.alone, fcfs.alone), (cost.beside_waiting, fcfs.beside_waiting))
            cells = [(_spread_text(a.total_us), f"{a.total_us.median / b.total_us.median:.2f}") for a, b in pairs]
            rows.append((cost.policy, *cells[0], *cells[1]))
        return rows

    def busy_rows(self) -> list[Row]:
        heading = ("pretended device", "step ms", "running", "steps", "busy", "host CPU ms a step")
        return [
            heading,
            *(
                (
                    "next step planned meanwhile" if busy.async_scheduling else "one step after the other",
                    f"{busy.step_s * 1e3:g}",
                    f"{busy.num_requests}",
                    f"{busy.num_steps}",
                    f"{busy.busy_share:.1%}",
                    f"{busy.cpu_s_per_step * 1e3:.3f}",
                )
                for busy in self.busy
            ),
        ]

    def prefix_rows(self) -> list[Row]:
        cost = self.prefix_cache
        if cost is None:
            return []
        return [
            ("prefix cache without a hit, us a step", f"{cost.num_requests} running"),
            ("  with it", _spread_text(cost.with_us)),
            ("  without", _spread_text(cost.without_us)),
            ("  difference", _spread_text(cost.difference_us)),
            (f"  share of a step of {cost.step_s * 1e3:g} ms", f"{cost.share_of_step:.2%}"),
        ]

    def as_dict(self) -> dict[str, Any]:
        return {
            "scheduler": [asdict(cost) for cost in self.costs],
            "policies": [asdict(cost) for cost in self.policies],
            "device": [{**_plain(busy), "profile": busy.profile.as_dict()} for busy in self.busy],
            "prefix_cache": None if self.prefix_cache is None else asdict(self.prefix_cache),
        }


def run_scheduler(args: SchedulerArgs, *, progress: Callable[[str, int, int], None] | None = None) -> SchedulerResult:
    total = len(args.counts) + len(args.policy_names) + (2 if args.device_ms else 0) + args.prefix_cache
    num_done = 0

    def advance() -> None:
        nonlocal num_done
        num_done += 1
        if progress is not None:
            progress("measurements", num_done, total)

    costs: list[SchedulerCost] = []
    for count in args.counts:
        costs.append(scheduler_cost(count, num_steps=args.num_steps, num_runs=args.num_runs))
        advance()
    policies: list[PolicyCost] = []
    for name in args.policy_names:
        policies.append(_policy_cost(name, args))
        advance()
    busy: list[BusyShare] = []
    for overlap in (True, False) if args.device_ms else ():
        busy.append(
            device_busy_share(
                args.device_requests,
                step_s=args.device_ms / 1e3,
                num_tokens=args.num_steps,
                async_scheduling=overlap,
            )
        )
        advance()
    prefix = None
    if args.prefix_cache:
        prefix = prefix_cache_cost(args.device_requests, num_runs=args.num_runs, step_s=(args.device_ms or 5.0) / 1e3)
        advance()
    return SchedulerResult(tuple(costs), tuple(policies), tuple(busy), prefix)


def _policy_cost(name: str, args: SchedulerArgs) -> PolicyCost:
    alone, beside_waiting = (
        scheduler_cost(
            args.counts[0], num_steps=args.num_steps, num_runs=args.num_runs, policy=name, num_waiting=num_waiting
        )
        for num_waiting in (0, args.num_waiting)
    )
    return PolicyCost(name, alone, beside_waiting)


def _spread_text(spread: Spread) -> str:
    return f"{spread.median:.1f} ({spread.low:.1f} to {spread.high:.1f})"


def _plain(busy: BusyShare) -> dict[str, Any]:
    names: Sequence[str] = [name for name in BusyShare.__slots__ if name != "profile"]
    return {name: getattr(busy, name) for name in names}
