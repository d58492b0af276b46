"""Workloads that a fleet is restarted with."""

from __future__ import annotations

import pickle

import pytest

from jaxllm.sim.fleet import Fleet, FleetSetup, Pool
from jaxllm.sim.workload_spec import make_workload
from tests.sim.test_chats_and_agents import AGENTS, CHATS
from tests.sim.test_single_requests import CLOSED, OPEN
from tests.sim.workload_runs import Steps, setup


def seen(fleet):
    while fleet.advance():
        pass
    return [(s.arrival, s.first_s, s.end_s, s.num_output, s.replica) for s in fleet.finish().served]


@pytest.mark.parametrize("spec", [OPEN, CLOSED, CHATS, AGENTS])
def test_a_run_that_is_restarted_ends_as_one_that_is_not(spec):
    pool = Pool(name="only", setup=setup(), cost=Steps(), num_replicas=2)
    plan = FleetSetup(pools=(pool,), report_s=0.5)
    whole, cut = (Fleet(plan, make_workload(spec, 2, "test: workload")) for _ in range(2))
    whole.start()
    cut.start()
    for _ in range(6):
        assert cut.advance()
    state, replicas = pickle.loads(pickle.dumps(cut.dump()))
    restarted = Fleet(plan, make_workload(spec, 2, "test: workload"))
    restarted.resume((state, replicas))
    assert seen(restarted) == seen(whole)
