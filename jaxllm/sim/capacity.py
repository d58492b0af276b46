"""The cheapest fleet that serves a workload within its targets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from jaxllm.errors import ConfigError
from jaxllm.sim.config import Candidate, CapacityPlan, Simulation
from jaxllm.sim.fleet import FleetSetup, run_fleet
from jaxllm.sim.metrics import Summary, summarise

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, slots=True)
class Choice:
    """What a candidate needs. `num_replicas` None: not even the most that are allowed are enough."""

    name: str
    num_replicas: int | None
    price_per_hour: float  # of all of them; of the most that are allowed where these are not enough
    summaries: tuple[Summary, ...]  # of that many, one a seed

    @property
    def share(self) -> float:
        """Of requests within their targets, on the worst seed."""
        return min(summary.slo_share for summary in self.summaries)


def plan_capacity(simulation: Simulation, *, num_workers: int = 1) -> list[Choice]:
    """The fewest replicas of each candidate, the cheapest fleet first; those that are not enough come last.

    More replicas are taken to serve no worse: the number is doubled until it is enough, then halved between. The
    first policy of the file counts, on all seeds.

    Raises:
        ConfigError: the file has no `capacity` section or no targets.
    """
    plan = simulation.capacity
    if plan is None:
        raise ConfigError(f"{simulation.path}: capacity is missing; accepted: a mapping with candidates")
    choices = [_fewest(simulation, plan, candidate, num_workers) for candidate in plan.candidates]
    return sorted(choices, key=lambda choice: (choice.num_replicas is None, choice.price_per_hour, choice.name))


def _fewest(simulation: Simulation, plan: CapacityPlan, candidate: Candidate, num_workers: int) -> Choice:
    tried: dict[int, tuple[Summary, ...]] = {}

    def is_enough(num_replicas: int) -> bool:
        if num_replicas not in tried:
            tried[num_replicas] = _tried(simulation, plan, candidate, num_replicas, num_workers)
        return all(summary.slo_share >= plan.share for summary in tried[num_replicas])

    found = fewest(is_enough, plan.most)
    num = plan.most if found is None else found
    return Choice(candidate.name, found, num * candidate.price_per_hour, tried[num])


def fewest(is_enough: Callable[[int], bool], most: int) -> int | None:
    """The smallest number from 1 to `most` that is enough, where all larger ones are too; None if none is."""
    high = next((num for num in _doubled(most) if is_enough(num)), None)
    if high is None:
        return None
    low = high // 2  # not enough, or 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def _doubled(most: int) -> Iterator[int]:
    num = 1
    while num < most:
        yield num
        num *= 2
    yield most


def _tried(
    simulation: Simulation, plan: CapacityPlan, candidate: Candidate, num_replicas: int, num_workers: int
) -> tuple[Summary, ...]:
    policy = simulation.policies[0]
    found: list[Summary] = []
    for seed in simulation.seeds:
        setup = simulation.setup(policy, seed, FleetSetup(pools=(candidate.pool,), report_s=plan.report_s))
        pools = tuple(replace(pool, num_replicas=num_replicas) for pool in setup.pools)
        run = run_fleet(replace(setup, pools=pools), simulation.workload(seed), num_workers=num_workers)
        found.append(summarise(run, simulation.slo, policy.label, seed, plan_hash=run.plan_hash))
        if found[-1].slo_share < plan.share:
            break  # enough to know
    return tuple(found)


def capacity_table(choices: Sequence[Choice]) -> Table:
    """A row for each candidate, the cheapest that is enough first."""
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for place, title in enumerate(_TITLES):
        table.add_column(title, justify="right" if place else "left", no_wrap=place < 2)
    for choice in choices:
        worst = min(choice.summaries, key=lambda summary: summary.slo_share)
        replicas = "not enough" if choice.num_replicas is None else str(choice.num_replicas)
        figures = (100 * choice.share, worst.ttft_s.p99, 1e3 * worst.tpot_s.p99, 100 * worst.device_busy)
        table.add_row(
            Text(choice.name), replicas, f"{choice.price_per_hour:,.2f}", *(f"{figure:.3g}" for figure in figures)
        )
    return table


_TITLES = ("", "replicas", "price an hour", "within targets, %", "TTFT p99, s", "TPOT p99, ms", "device busy, %")


def capacity_json(choices: Sequence[Choice]) -> list[dict[str, Any]]:
    return [
        {
            "name": choice.name,
            "num_replicas": choice.num_replicas,
            "price_per_hour": choice.price_per_hour,
            "slo_share": choice.share,
            "runs": [summary.as_dict() for summary in choice.summaries],
        }
        for choice in choices
    ]
