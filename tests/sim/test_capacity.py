"""The cheapest fleet: the fewest replicas that are enough, by the same runs that anybody could make."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.cli import main
from jaxllm.errors import ConfigError
from jaxllm.sim.capacity import fewest, plan_capacity
from jaxllm.sim.config import load_simulation
from jaxllm.sim.fleet import run_fleet
from jaxllm.sim.metrics import summarise

FILE = """\
engine: {max_num_seqs: 4, max_num_batched_tokens: 64, num_pages: 200}
slo: {ttft_s: 0.3}
seeds: [0, 1]
capacity:
  most: 8
  candidates:
    - {name: fast, price_per_hour: 5, cost: {kind: constant, step_s: 0.005, token_s: 0.0001}}
    - {name: slow, price_per_hour: 2, cost: {kind: constant, step_s: 0.02, token_s: 0.0004}}
    - {name: hopeless, price_per_hour: 1, cost: {kind: constant, step_s: 0.5}}
workload: {kind: poisson, rate: 25, num_requests: 150, prompt: 30, output: 10}
"""


@given(needed=st.integers(1, 300), most=st.integers(1, 200))
def test_the_smallest_number_that_is_enough_is_found(needed: int, most: int) -> None:
    asked: list[int] = []

    def is_enough(num: int) -> bool:
        asked.append(num)
        return num >= needed

    assert fewest(is_enough, most) == (needed if needed <= most else None)
    assert max(asked) <= most and len(asked) <= 2 * most.bit_length() + 1


def test_the_cheapest_comes_first_and_one_replica_less_is_not_enough(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(FILE)
    simulation = load_simulation(path)
    choices = plan_capacity(simulation)
    assert [choice.name for choice in choices][-1] == "hopeless" and choices[-1].num_replicas is None
    prices = [choice.price_per_hour for choice in choices if choice.num_replicas is not None]
    assert prices == sorted(prices) and len(prices) == 2
    plan = simulation.capacity
    assert plan is not None
    for choice in choices[:2]:
        assert choice.num_replicas is not None and choice.share >= 0.99
        candidate = next(each for each in plan.candidates if each.name == choice.name)
        assert choice.price_per_hour == choice.num_replicas * candidate.price_per_hour
        shares: list[float] = []
        for seed in simulation.seeds if choice.num_replicas > 1 else ():
            setup = simulation.setup(simulation.policies[0], seed, simulation.fleet)
            pool = type(candidate.pool)(
                name="less",
                setup=candidate.pool.setup,
                cost=candidate.pool.cost,
                num_replicas=choice.num_replicas - 1,
            )
            run = run_fleet(type(setup)(pools=(pool,), seed=seed), simulation.workload(seed))
            shares.append(summarise(run, simulation.slo, "", seed).slo_share)
        assert not shares or min(shares) < 0.99


def test_the_command_prints_the_fleets_and_fails_if_none_is_enough(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(FILE.replace("[0, 1]", "[0]"))
    assert main(["simulate", str(path), "--capacity", "--json", "-"]) == 0
    captured = capsys.readouterr()
    assert "not enough" in captured.err
    assert [each["name"] for each in json.loads(captured.out)][-1] == "hopeless"
    path.write_text(FILE.replace("most: 8", "most: 1").replace("ttft_s: 0.3", "ttft_s: 0.001"))
    assert main(["simulate", str(path), "--capacity"]) == 1


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("slo: {ttft_s: 0.3}\n", "", "slo is missing"),
        ("price_per_hour: 5, ", "", r"candidates.*\[0\].price_per_hour is missing"),
        ("name: slow", "name: fast", "each name once"),
        ("most: 8", "most: 0", r"capacity.*most.*=0; accepted"),
        ("most: 8", "share: 2", r"share.*=2; accepted"),
    ],
)
def test_a_wrong_plan_is_refused(old: str, new: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(FILE.replace(old, new))
    with pytest.raises(ConfigError, match=message):
        load_simulation(path)
