"""A simulation as its YAML file describes it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import msgspec

from jaxllm.config.engine import CacheConfig, SchedulerConfig
from jaxllm.errors import ConfigError, JaxLLMError
from jaxllm.scheduler.registry import create_policy
from jaxllm.sim.cost import CostModel
from jaxllm.sim.cost_spec import make_cost
from jaxllm.sim.fleet import Autoscale, Failure, FleetSetup, Pool, Transfer
from jaxllm.sim.metrics import Slo, make_slo
from jaxllm.sim.replica import EngineSetup
from jaxllm.sim.roofline import Roofline
from jaxllm.sim.router import ROUTERS
from jaxllm.sim.section import Section, load_lined
from jaxllm.sim.workload import Workload
from jaxllm.sim.workload_spec import make_workload

_ROLES = ("whole", "prefill", "decode")
_UNNAMED = "pool"
_MOST = 10**8  # pages or requests: each takes memory
_LEAST_REPORT_S = 1e-3  # shorter windows take longer than what happens in them


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyChoice:
    name: str
    options: Mapping[str, Any]

    @property
    def label(self) -> str:
        options = ", ".join(f"{name}={value}" for name, value in self.options.items())
        return f"{self.name} ({options})" if options else self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Replicas that a fleet could be made of."""

    name: str
    pool: Pool  # of one
    price_per_hour: float  # of one, in any currency


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityPlan:
    """What to look for the cheapest fleet among."""

    candidates: tuple[Candidate, ...]
    share: float = 0.99  # of requests that must be within their targets
    most: int = 64  # replicas
    report_s: float = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What is to be run: each policy on each seed."""

    path: Path
    text: str
    fleet: FleetSetup
    is_fleet: bool  # else one engine, without a router
    policies: tuple[PolicyChoice, ...]
    seeds: tuple[int, ...]
    workload_spec: Mapping[str, Any]
    cost_specs: tuple[Mapping[str, Any], ...]  # of all parts; what their files hold is no part of `text`
    slo: Slo | None
    capacity: CapacityPlan | None = None

    def workload(self, seed: int) -> Workload:
        return make_workload(self.workload_spec, seed, f"{self.path}: workload", folder=self.path.parent)

    def setup(self, policy: PolicyChoice, seed: int, fleet: FleetSetup | None = None) -> FleetSetup:
        """The fleet (the file's, or the one engine) with that policy."""
        fleet = fleet or self.fleet
        pools = tuple(_with_policy(pool, policy) for pool in fleet.pools)
        return replace(fleet, pools=pools, seed=seed)

    def digest(self, policy: PolicyChoice, seed: int) -> str:
        """Of all that decides the result, for checkpoints."""
        content = msgspec.json.encode([self.text, policy.name, dict(policy.options), seed])
        found = hashlib.sha256(content)
        for name in _named_files([self.workload_spec, *self.cost_specs]):
            path = self.path.parent / Path(name).expanduser()
            found.update(hashlib.sha256(path.read_bytes() if path.is_file() else b"").digest())
        return found.hexdigest()


def load_simulation(path: str | Path) -> Simulation:
    """
    Raises:
        ConfigError: the file cannot be read, or a key of it is unknown, missing or wrong; the message names the
            file, the line and the key.
    """
    path = Path(path)
    spec = load_lined(path)
    root = Section(spec, f"{path}: ")
    engine = _Engine(root.inner("engine"))
    cost_spec, slo_spec = root.mapping("cost", None), root.mapping("slo", None)
    cost = None if cost_spec is None else make_cost(cost_spec, f"{path}: cost", folder=path.parent)
    slo = None if slo_spec is None else make_slo(slo_spec, f"{path}: slo")
    fleet = root.optional("fleet")
    capacity = _capacity(root.optional("capacity"), engine, path)
    if capacity is not None and slo is None:
        raise ConfigError(f"{path}: slo is missing; accepted: a mapping with targets, which capacity is planned for")
    is_single = fleet is None and capacity is None
    simulation = Simulation(
        path=path,
        text=spec.text,
        fleet=_fleet(fleet, engine, cost, path) if fleet is not None or is_single else _first_of(capacity),
        is_fleet=fleet is not None,
        policies=_policies(root),
        seeds=_seeds(root),
        workload_spec=root.mapping("workload"),
        cost_specs=_cost_specs(spec),
        slo=slo,
        capacity=capacity,
    )
    root.done()
    simulation.workload(simulation.seeds[0])  # a wrong one is told of now
    return simulation


def _cost_specs(spec: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """Of a file that was found right."""
    pools = (spec.get("fleet") or {}).get("pools", [])
    found = [spec.get("cost"), *(pool.get("cost") for pool in pools)]
    return tuple(each for each in found if each)


def _named_files(specs: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    for spec in specs:
        for key, value in spec.items():
            if isinstance(value, Mapping):
                yield from _named_files([cast("Mapping[str, Any]", value)])
            elif isinstance(value, str) and (key == "file" or value.endswith(".json")):
                yield value


class _Engine:
    """The `engine` section: names of flags, and `host_s`."""

    def __init__(self, section: Section, base: _Engine | None = None) -> None:
        self.section = section
        old, cache = (base.scheduler, base.cache) if base is not None else (SchedulerConfig(), CacheConfig())
        self.num_pages = section.whole("num_pages", base.num_pages if base is not None else None, low=2, high=_MOST)
        self.scheduler = replace(
            old,
            max_num_seqs=section.whole("max_num_seqs", old.max_num_seqs, low=1, high=_MOST),
            max_num_batched_tokens=section.whole("max_num_batched_tokens", old.max_num_batched_tokens, low=1),
            max_model_len=section.whole("max_model_len", old.max_model_len, low=2),
            enable_chunked_prefill=section.switch("enable_chunked_prefill", old.enable_chunked_prefill),
            long_prefill_token_threshold=section.whole(
                "long_prefill_token_threshold", old.long_prefill_token_threshold
            ),
            max_num_partial_prefills=section.whole("max_num_partial_prefills", old.max_num_partial_prefills, low=1),
            max_long_partial_prefills=section.whole("max_long_partial_prefills", old.max_long_partial_prefills, low=1),
            decode_budget_share=section.number("decode_budget_share", old.decode_budget_share, high=0.99),
            in_batch_prefix_sharing=section.switch("in_batch_prefix_sharing", old.in_batch_prefix_sharing),
            async_scheduling=section.switch("async_scheduling", old.async_scheduling),
            max_num_queued_reqs=section.whole("max_num_queued_reqs", old.max_num_queued_reqs, low=1),
            max_num_queued_tokens=section.whole("max_num_queued_tokens", old.max_num_queued_tokens, low=1),
            default_deadline_s=section.number("default_deadline_s", old.default_deadline_s, above=0),
        )
        self.cache = replace(
            cache,
            page_size=section.whole("page_size", cache.page_size, low=1, high=4096),
            enable_prefix_caching=section.switch("enable_prefix_caching", cache.enable_prefix_caching),
            enable_partial_page_reuse=section.switch("enable_partial_page_reuse", cache.enable_partial_page_reuse),
        )
        self.host_s = section.number("host_s", base.host_s if base is not None else 0.0, high=10.0)
        section.done()

    def changed_by(self, section: Section | None) -> _Engine:
        """The same with what a pool says of its own."""
        return self if section is None else _Engine(section, self)

    def setup(self, cost: CostModel) -> EngineSetup:
        """Pages as given, else as many as the described device has room for."""
        scheduler, budget = self.scheduler, self.scheduler.max_num_batched_tokens
        if not scheduler.enable_chunked_prefill and budget < scheduler.max_model_len:
            accepted = f"at least max_model_len={scheduler.max_model_len}, or enable_chunked_prefill"
            raise self.section.fail("max_num_batched_tokens", budget, accepted)
        num_pages = self.num_pages
        if num_pages is None:
            if not isinstance(cost, Roofline):
                raise ConfigError(f"{self.section.where}.num_pages is missing; accepted: a whole number, at least 2")
            num_pages = 1 + cost.kv_capacity_tokens() // self.cache.page_size
            if num_pages < 2:
                raise ConfigError(
                    f"{self.section.where}: {cost.model.name} leaves no memory for KV on {cost.device.name}"
                )
            if num_pages > _MOST:
                raise ConfigError(f"{self.section.where}: {cost.device.name} has room for over {_MOST} pages")
        return EngineSetup(scheduler=self.scheduler, cache=replace(self.cache, num_pages=num_pages), host_s=self.host_s)


def _fleet(section: Section | None, engine: _Engine, cost: CostModel | None, path: Path) -> FleetSetup:
    if section is None:
        if cost is None:
            raise ConfigError(f"{path}: cost is missing; accepted: a mapping")
        return FleetSetup(pools=(Pool(name="engine", setup=engine.setup(cost), cost=cost, num_replicas=1),))
    pools: list[Pool] = []
    for number, content in enumerate(section.items("pools")):
        pools.append(_pool(Section(content, f"{section.path('pools')}[{number}]"), engine, cost, path))
    transfer = _transfer(section.optional("transfer"))
    failures = [
        _failure(Section(content, f"{section.path('failures')}[{number}]"))
        for number, content in enumerate(section.items("failures", []))
    ]
    report_s = section.number("report_s", 0.1, low=_LEAST_REPORT_S)
    section.done()
    if transfer is not None and all(pool.role == "whole" for pool in pools):
        raise ConfigError(f"{section.path('transfer')} is of prefill and decode pools; accepted: leave it out")
    names = [pool.name for pool in pools if pool.name != _UNNAMED]
    if len(set(names)) < len(names):
        raise section.fail("pools", names, "each name once")
    try:
        return FleetSetup(pools=tuple(pools), report_s=report_s, transfer=transfer, failures=tuple(failures))
    except ConfigError as error:
        raise ConfigError(f"{section.where}: {error}") from None


def _pool(section: Section, engine: _Engine, cost: CostModel | None, path: Path) -> Pool:
    name = section.text("name", _UNNAMED)
    own_cost = section.mapping("cost", None)
    if own_cost is not None:
        cost = make_cost(own_cost, section.path("cost"), folder=path.parent)
    if cost is None:
        raise ConfigError(f"{section.where}.cost is missing; accepted: a mapping, here or at the top")
    own = engine.changed_by(section.optional("engine"))
    num_replicas = section.whole("num_replicas", low=1, high=100_000)
    pool = Pool(
        name=name,
        setup=own.setup(cost),
        cost=cost,
        num_replicas=num_replicas,
        role=section.text("role", "whole", choices=_ROLES),
        router=section.text("router", "least_loaded", choices=tuple(ROUTERS)),
        autoscale=_autoscale(section.optional("autoscale"), num_replicas),
    )
    section.done()
    return pool


def _capacity(section: Section | None, engine: _Engine, path: Path) -> CapacityPlan | None:
    if section is None:
        return None
    candidates: list[Candidate] = []
    for number, content in enumerate(section.items("candidates")):
        each = Section(content, f"{section.path('candidates')}[{number}]")
        cost = make_cost(each.mapping("cost"), each.path("cost"), folder=path.parent)
        own = engine.changed_by(each.optional("engine"))
        name, router = each.text("name"), each.text("router", "least_loaded", choices=tuple(ROUTERS))
        price = each.number("price_per_hour", above=0)
        each.done()
        pool = Pool(name=name, setup=own.setup(cost), cost=cost, num_replicas=1, router=router)
        candidates.append(Candidate(name=name, pool=pool, price_per_hour=price))
    plan = CapacityPlan(
        candidates=tuple(candidates),
        share=section.number("share", 0.99, above=0, high=1),
        most=section.whole("most", 64, low=1, high=100_000),
        report_s=section.number("report_s", 0.1, low=_LEAST_REPORT_S),
    )
    section.done()
    if len({candidate.name for candidate in candidates}) < len(candidates):
        raise section.fail("candidates", [candidate.name for candidate in candidates], "each name once")
    return plan


def _first_of(capacity: CapacityPlan | None) -> FleetSetup:
    """What runs where nothing is said but candidates: one replica of the first."""
    pools = () if capacity is None else (capacity.candidates[0].pool,)
    return FleetSetup(pools=pools)


def _autoscale(section: Section | None, num_replicas: int) -> Autoscale | None:
    if section is None:
        return None
    low = section.number("low", 8.0)
    found = Autoscale(
        most=section.whole("most", low=num_replicas, high=100_000),
        least=section.whole("least", 1, low=1, high=num_replicas),
        high=section.number("high", 32.0, low=low),
        low=low,
        startup_s=section.number("startup_s", 60.0),
        cooldown_s=section.number("cooldown_s", 30.0),
    )
    section.done()
    return found


def _transfer(section: Section | None) -> Transfer | None:
    if section is None:
        return None
    found = Transfer(
        bytes_per_token=section.number("bytes_per_token"),
        bytes_per_s=section.number("bytes_per_s", above=0, high=1e15),
        latency_s=section.number("latency_s", 0.0),
    )
    section.done()
    return found


def _failure(section: Section) -> Failure:
    at_s, replica = section.number("at_s"), section.whole("replica")
    down_s = section.number("down_s", float("inf"))
    section.done()
    return Failure(at_s=at_s, replica=replica, down_s=down_s)


def _policies(root: Section) -> tuple[PolicyChoice, ...]:
    choices: list[PolicyChoice] = []
    for number, content in enumerate(root.items("policies", ["fcfs"])):
        where = f"{root.path('policies')}[{number}]"
        if isinstance(content, str):
            choice = PolicyChoice(name=content, options={})
        else:
            section = Section(content, where)
            choice = PolicyChoice(name=section.text("name"), options=dict(section.mapping("options", {})))
            section.done()
        try:
            create_policy(choice.name, choice.options)
        except JaxLLMError as error:
            raise ConfigError(f"{where}: {error}") from None
        choices.append(choice)
    if len({choice.label for choice in choices}) < len(choices):
        raise root.fail("policies", [choice.label for choice in choices], "each once")
    return tuple(choices)


def _seeds(root: Section) -> tuple[int, ...]:
    seeds: Sequence[Any] = root.items("seeds", [0])
    for seed in seeds:
        if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**63:
            raise root.fail("seeds", list(seeds), "a list of whole numbers from 0")
    if len(set(seeds)) < len(seeds):
        raise root.fail("seeds", list(seeds), "each once")
    return tuple(seeds)


def _with_policy(pool: Pool, policy: PolicyChoice) -> Pool:
    scheduler = replace(pool.setup.scheduler, policy=policy.name, policy_options=policy.options)
    return replace(pool, setup=replace(pool.setup, scheduler=scheduler))
