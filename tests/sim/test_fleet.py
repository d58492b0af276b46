"""A fleet: nobody is lost, nothing depends on the number of processes, and each part does what it says."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from jaxllm.config.engine import CacheConfig, SchedulerConfig
from jaxllm.errors import ConfigError, JaxLLMError
from jaxllm.sim.checkpoint import Checkpoint, run_with_checkpoints
from jaxllm.sim.fleet import Autoscale, Failure, Fleet, FleetSetup, Pool, Transfer, run_fleet
from jaxllm.sim.host import Host, HostProcess
from jaxllm.sim.replica import EngineSetup
from jaxllm.sim.router import LeastLoaded, Load, PowerOfTwo, PrefixHash, RoundRobin
from jaxllm.sim.simulator import OneEngine, Run
from jaxllm.sim.workload import Arrival
from jaxllm.types.request import FinishReason
from jaxllm.types.step import SchedulerOutput


@dataclass(frozen=True)
class Steps:
    """A step of 10 ms, and 0.1 ms for each token."""

    step_s: float = 0.01

    def step_seconds(self, plan: SchedulerOutput) -> float:
        return self.step_s + 0.0001 * plan.total_tokens


@dataclass
class Listed:
    """Requests at given times, each followed by `more` others when it ends."""

    arrivals: Sequence[Arrival]
    more: int = 0
    num_ended: Counter[str] = field(default_factory=Counter[str])

    def start(self) -> Iterable[Arrival]:
        return self.arrivals

    def ended(self, arrival: Arrival, at_s: float, output_ids: Sequence[int]) -> Sequence[Arrival]:
        self.num_ended[arrival.request_id] += 1
        name, _, turn = arrival.request_id.partition("/")
        number = int(turn or 0) + 1
        if number > self.more:
            return ()
        prompt = (*arrival.prompt_ids, *output_ids, 7, 8, 9)
        return (Arrival(at_s + 0.3, f"{name}/{number}", prompt, 5, session=name),)


SETUP = EngineSetup(
    scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=512),
    cache=CacheConfig(page_size=8, num_pages=200),
)


def listed(num: int, gap_s: float = 0.02, more: int = 0, num_output: int = 20) -> Listed:
    prompts = [tuple(range(100 * (i % 5), 100 * (i % 5) + 30 + i % 7)) for i in range(num)]
    return Listed([Arrival(gap_s * i, f"r{i}", prompt, num_output) for i, prompt in enumerate(prompts)], more)


def fleet(num: int = 4, **more: object) -> FleetSetup:
    pool = Pool(name="all", setup=SETUP, cost=Steps(), num_replicas=num)
    return FleetSetup(**{"pools": (pool,), "report_s": 0.05, **more})  # type: ignore[arg-type]


def seen(run: Run) -> list[tuple[object, ...]]:
    return [
        (s.arrival.request_id, s.replica, s.scheduled_s, s.first_s, s.last_s, s.num_output, s.num_hits, s.num_retries)
        for s in run.served
    ]


def test_every_request_ends_once_with_all_its_tokens() -> None:
    workload = listed(60, more=2)
    run = run_fleet(fleet(), workload)
    assert workload.num_ended == Counter([f"r{i}{turn}" for i in range(60) for turn in ("", "/1", "/2")])
    assert all(s.reason is FinishReason.LENGTH for s in run.served)
    assert sum(s.num_output for s in run.served) == 60 * (20 + 5 + 5)
    assert all(s.arrival.at_s <= (s.first_s or 0) <= (s.end_s or 0) for s in run.served)
    assert run.prefix_hits > 0


@pytest.mark.parametrize("router", ["round_robin", "least_loaded", "power_of_two", "prefix_hash"])
def test_two_processes_see_what_one_sees(router: str) -> None:
    pool = Pool(name="all", setup=SETUP, cost=Steps(), num_replicas=3, router=router)
    setup = fleet(pools=(pool,), failures=(Failure(at_s=0.4, replica=1, down_s=0.3),))
    one, two = (run_fleet(setup, listed(40, more=1), num_workers=n) for n in (1, 2))
    assert seen(one) == seen(two)
    assert one.plan_hash == two.plan_hash and one.duration_s == two.duration_s


@pytest.mark.parametrize("router", ["least_loaded", "power_of_two"])
def test_between_two_reports_a_router_counts_what_it_sent_itself(router: str) -> None:
    pool = Pool(name="all", setup=SETUP, cost=Steps(), num_replicas=4, router=router)
    run = run_fleet(fleet(pools=(pool,), report_s=10.0), listed(40, gap_s=0.001))
    sent = Counter(s.replica for s in run.served)
    assert len(sent) == 4 and max(sent.values()) - min(sent.values()) <= (0 if router == "least_loaded" else 3)


def test_one_replica_behind_a_router_serves_like_an_engine_alone() -> None:
    pool = Pool(name="all", setup=SETUP, cost=Steps(), num_replicas=1)
    behind = run_fleet(fleet(pools=(pool,)), listed(30))
    alone = OneEngine(SETUP, Steps(), listed(30))
    alone.start()
    while alone.advance():
        pass
    assert seen(behind) == seen(alone.finish())


def test_what_a_failed_replica_had_is_served_elsewhere() -> None:
    run = run_fleet(fleet(2, failures=(Failure(at_s=0.3, replica=0),)), listed(30))
    assert len(run.served) == 30 and all(s.num_output == 20 for s in run.served)
    retried = [s for s in run.served if s.num_retries]
    assert retried and all(s.replica == 1 for s in retried)
    assert {s.replica for s in run.served if (s.end_s or 0) > 0.35} == {1}


def test_without_any_replica_left_the_run_says_so() -> None:
    with pytest.raises(JaxLLMError, match="no whole replica is left"):
        run_fleet(fleet(1, failures=(Failure(at_s=0.1, replica=0),)), listed(30))


def test_replicas_come_under_load_and_go_when_it_is_over() -> None:
    rules = Autoscale(most=4, high=6.0, low=2.0, startup_s=0.2, cooldown_s=0.1)
    pool = Pool(name="all", setup=SETUP, cost=Steps(), num_replicas=1, autoscale=rules)
    slow = [Arrival(10.0 + i, f"s{i}", (1, 2, 3), 4) for i in range(5)]
    workload = listed(60, gap_s=0.01)
    workload.arrivals = [*workload.arrivals, *slow]
    run = run_fleet(fleet(pools=(pool,)), workload)
    assert len({s.replica for s in run.served}) > 1
    assert {s.replica for s in run.served[-2:]} == {0}
    assert run.replica_s < 2 * run.duration_s
    alone = run_fleet(fleet(1), listed(60, gap_s=0.01))
    mean_first = [sum((s.first_s or 0) - s.arrival.at_s for s in r.served[:60]) for r in (run, alone)]
    assert mean_first[0] < mean_first[1]


def test_prompt_and_output_on_different_replicas_wait_for_the_transfer() -> None:
    prefill = Pool(name="p", setup=SETUP, cost=Steps(), num_replicas=2, role="prefill")
    decode = Pool(name="d", setup=SETUP, cost=Steps(), num_replicas=2, role="decode")
    transfer = Transfer(bytes_per_token=1000.0, bytes_per_s=100_000.0, latency_s=0.1)
    run = run_fleet(fleet(pools=(prefill, decode), transfer=transfer), listed(20))
    assert all(s.num_output == 20 and s.replica in (2, 3) for s in run.served)
    assert all(s.longest_gap_s >= 0.1 + 0.01 * s.arrival.num_prompt for s in run.served)
    assert run.num_computed_tokens == sum(s.arrival.num_prompt - s.num_hits + 20 - 1 for s in run.served)


def test_a_run_that_is_killed_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    whole = run_fleet(fleet(), listed(40, more=1))
    killed = Fleet(fleet(), listed(40, more=1))
    killed.start()
    for _ in range(9):
        killed.advance()
    Checkpoint(path, "this").save(killed, 1)
    for _ in range(5):
        killed.advance()  # lost
    resumed = run_with_checkpoints(Fleet(fleet(), listed(40, more=1)), Checkpoint(path, "this"))
    assert seen(resumed) == seen(whole) and resumed.plan_hash == whole.plan_hash
    assert not path.exists()


def test_an_engine_alone_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    arrivals = [Arrival(float(i), f"r{i}", tuple(range(i, i + 30)), 20) for i in range(40)]
    engines = [OneEngine(SETUP, Steps(), Listed(arrivals, 1)) for _ in range(3)]
    for engine in engines[:2]:
        engine.start()
    while engines[0].advance():
        pass
    engines[1].advance()
    engines[1].advance()
    Checkpoint(path, "this").save(engines[1], 1)
    resumed = run_with_checkpoints(engines[2], Checkpoint(path, "this"))
    whole = engines[0].finish()
    assert len(whole.served) == 80
    assert seen(resumed) == seen(whole) and resumed.plan_hash == whole.plan_hash


@pytest.mark.parametrize("content", [b"", b"no pickle", b"\x80\x04N."])
def test_a_file_that_is_no_checkpoint_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "saved"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"checkpoint=.*saved' is none; accepted"):
        Checkpoint(path, "this").load(1)


def test_a_checkpoint_of_another_simulation_is_refused(tmp_path: Path) -> None:
    running = Fleet(fleet(), listed(5))
    running.start()
    Checkpoint(tmp_path / "saved", "this").save(running, 1)
    for config, workers in (("other", 1), ("this", 2)):
        with pytest.raises(ConfigError, match="another simulation or number of workers"):
            Checkpoint(tmp_path / "saved", config).load(workers)


# Routers


def loads(*known: int) -> list[Load]:
    return [Load(number, num_open=each) for number, each in enumerate(known)]


ANY = Arrival(0.0, "r", tuple(range(50)), 1)


def test_routers_choose_as_they_are_called() -> None:
    turn = RoundRobin()
    assert [turn.choose(ANY, loads(5, 0, 0)).number for _ in range(5)] == [0, 1, 2, 0, 1]
    assert LeastLoaded().choose(ANY, loads(5, 2, 2)).number == 1
    two = PowerOfTwo(1)
    drawn = Counter(two.choose(ANY, loads(9, 5, 1)).number for _ in range(300))
    assert drawn[0] == 0 and drawn[2] > drawn[1] > 50


def test_equal_beginnings_go_to_the_same_replica_unless_it_has_too_much() -> None:
    router = PrefixHash(prefix_tokens=16)
    first = router.choose(ANY, loads(0, 0, 0, 0)).number
    same = Arrival(0.0, "s", (*range(16), 99, 98), 1)
    assert router.choose(same, loads(0, 0, 0, 0)).number == first
    busy = loads(0, 0, 0, 0)
    busy[first].num_open = 40
    assert router.choose(same, busy).number != first
    others = {router.choose(Arrival(0.0, "o", tuple(range(i, i + 16)), 1), loads(0, 0, 0, 0)).number for i in range(60)}
    assert others == {0, 1, 2, 3}


def test_a_replica_that_leaves_takes_only_its_own_prefixes_along() -> None:
    router = PrefixHash(prefix_tokens=4)
    prompts = [Arrival(0.0, "p", (i, i + 1, i + 2, i + 3), 1) for i in range(200)]
    before = [router.choose(prompt, loads(0, 0, 0, 0)).number for prompt in prompts]
    after = [router.choose(prompt, loads(0, 0, 0)).number for prompt in prompts]
    assert all(old == new for old, new in zip(before, after, strict=True) if old != 3)


def test_a_worker_that_was_killed_is_told_of() -> None:
    host = HostProcess(Host([(SETUP, Steps())]))
    os.kill(host.pid, signal.SIGKILL)
    with pytest.raises(JaxLLMError, match=r"ended \(exit code -9\)"):
        for _ in range(1000):  # a call may be taken before the process is gone
            host.send("totals")
            host.answer()
    with pytest.raises(JaxLLMError, match=r"ended \(exit code -9\)"):
        host.send("totals")
    host.close()
