"""All runs of a simulation: each policy on each seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from jaxllm.sim.checkpoint import Checkpoint, Resumable, run_with_checkpoints
from jaxllm.sim.config import PolicyChoice, Simulation
from jaxllm.sim.fleet import Fleet
from jaxllm.sim.metrics import Outcome, summarise
from jaxllm.sim.simulator import OneEngine, Run
from jaxllm.sim.workload_spec import tokens_of


def run_all(
    simulation: Simulation,
    *,
    num_workers: int = 1,
    checkpoint: Path | None = None,
    on_run: Callable[[str, int], None] = lambda policy, seed: None,
) -> Iterator[Outcome]:
    """Policy by policy, seed by seed. `on_run` is told of each before it begins.

    With a checkpoint what is running is saved now and then, in a file for each run beside that name, and goes
    on from there the next time.

    Raises:
        ConfigError: a checkpoint cannot be used.
    """
    for number, policy in enumerate(simulation.policies):
        for seed in simulation.seeds:
            on_run(policy.label, seed)
            saved = None if checkpoint is None else checkpoint.with_name(f"{checkpoint.name}.{number}.{seed}")
            run = _run(simulation, policy, seed, num_workers, saved)
            yield Outcome(summarise(run, simulation.slo, policy.label, seed, plan_hash=run.plan_hash), run)


def _run(simulation: Simulation, policy: PolicyChoice, seed: int, num_workers: int, saved: Path | None) -> Run:
    setup, workload = simulation.setup(policy, seed), simulation.workload(seed)
    running: Resumable
    if simulation.is_fleet:
        running = Fleet(setup, workload, num_workers=num_workers)
    else:
        (pool,) = setup.pools
        running = OneEngine(pool.setup, pool.cost, workload, tokens=tokens_of(workload))
    if saved is not None:
        checkpoint = Checkpoint(saved, simulation.digest(policy, seed))
        return run_with_checkpoints(running, checkpoint, num_workers=num_workers)
    running.start()
    while running.advance():
        pass
    return running.finish()
