"""How far the simulator is from the engine on this machine: `python -m scripts.check_simulator [--repetitions 3]`.

Runs the default model (or `--model`) on four loads in turn, one of which with another token budget, and records
them; fits a table of step times to the first load alone; simulates the others with their own arrivals and tokens, and
prints total time, mean time to the first token and mean time a token, measured and simulated, with the spread between
repetitions. Repetitions go round all loads, so that a machine that grows slower does so for all of them. Wants a
machine with nothing else to do. Exit code 1 if a figure is off by more than 15 % and twice the spread.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxllm.build import build_parts
from jaxllm.config.engine import CacheConfig, EngineArgs
from jaxllm.engine.async_engine import AsyncEngine
from jaxllm.engine.inputs import TokensPrompt
from jaxllm.engine.trace import Header
from jaxllm.sim.calibrate import fit_table, read_steps
from jaxllm.sim.cost import CostModel
from jaxllm.sim.metrics import columns_of
from jaxllm.sim.recorded import read_recorded
from jaxllm.sim.replica import EngineSetup
from jaxllm.sim.simulator import simulate
from jaxllm.sim.workload import Arrival
from jaxllm.sim.workload_spec import make_workload
from jaxllm.types.sampling import SamplingParams

_LENGTHS = {
    "prompt": {"kind": "lognormal", "median": 120, "sigma": 0.8, "max": 600},
    "output": {"kind": "lognormal", "median": 60, "sigma": 0.6, "max": 200},
}
_CALIBRATION: Mapping[str, Any] = {"kind": "poisson", "rate": 1.2, "num_requests": 60, **_LENGTHS}
_LOADS: Mapping[str, tuple[Mapping[str, Any], int]] = {  # the load, and the token budget
    "steady, other lengths": (
        {"kind": "poisson", "rate": 0.8, "num_requests": 30, "prompt": [60, 240], "output": [30, 90]},
        256,
    ),
    "all at once": ({"kind": "at_once", "num_requests": 24, **_LENGTHS}, 256),
    "another budget": ({"kind": "gamma", "cv": 2, "rate": 1.0, "num_requests": 30, **_LENGTHS}, 128),
}
_LIMIT = 0.15


@dataclass(frozen=True)
class Figures:
    """Seconds, of a run."""

    total: float
    ttft: float
    tpot: float

    @property
    def values(self) -> tuple[float, float, float]:
        return self.total, self.ttft, self.tpot


@dataclass(frozen=True)
class Measured:
    """A run of the engine: what it recorded, and what a client saw."""

    trace: Path
    figures: Figures


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="default: the default model")
    parser.add_argument("--repetitions", type=int, default=3, help="of each measurement (%(default)s)")
    flags = parser.parse_args(argv)
    if flags.repetitions < 1:
        parser.error(f"repetitions={flags.repetitions}; accepted: at least 1")
    with tempfile.TemporaryDirectory() as folder:
        calibrations, loads = _measure_all(flags, Path(folder))
        cost = fit_table([step for path in calibrations for step in read_steps(path).steps])
        is_near = [check(name, traces, cost) for name, traces in loads.items()]
    return 0 if all(is_near) else 1


def _measure_all(flags: argparse.Namespace, folder: Path) -> tuple[list[Path], dict[str, list[Measured]]]:
    """The traces of the calibration, and of each load its runs."""
    calibrations: list[Path] = []
    loads: dict[str, list[Measured]] = {name: [] for name in _LOADS}
    for number in range(flags.repetitions):
        calibrations.append(folder / f"calibration.{number}.jsonl")
        measure(flags.model, _CALIBRATION, 256, calibrations[-1])
        for name, (load, budget) in _LOADS.items():
            trace = folder / f"{name}.{number}.jsonl"
            loads[name].append(Measured(trace, measure(flags.model, load, budget, trace)))
    return calibrations, loads


def check(name: str, runs: list[Measured], cost: CostModel) -> bool:
    simulated = simulated_figures(runs[0].trace, cost)
    is_near = True
    print(name)
    for title, values, found in zip(
        ("total, s", "mean TTFT, s", "mean TPOT, s"),
        zip(*(run.figures.values for run in runs), strict=True),
        simulated.values,
        strict=True,
    ):
        middle = statistics.mean(values)
        spread, off = (max(values) - min(values)) / middle, found / middle - 1
        is_near &= abs(off) <= max(_LIMIT, 2 * spread)
        print(f"  {title:14} measured {middle:8.3f} (spread {spread:.1%})  simulated {found:8.3f}  off {off:+.1%}")
    return is_near


def measure(model: str | None, load: Mapping[str, Any], budget: int, trace: Path) -> Figures:
    args = EngineArgs(
        model=model,
        max_num_seqs=16,
        max_num_batched_tokens=budget,
        max_model_len=1024,
        record_trace=str(trace),
    )
    return asyncio.run(_measure(args, list(make_workload(load, 1, "check_simulator").start())))


async def _measure(args: EngineArgs, arrivals: list[Arrival]) -> Figures:
    engine = AsyncEngine(build_parts(args))
    try:
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        found = await asyncio.gather(*[_ask(engine, arrival, started_s) for arrival in arrivals])
    finally:
        await engine.close()
    total_s = max(last for _, _, last, _ in found) - started_s
    ttft = statistics.mean(first - due for due, first, _, _ in found)
    tpot = statistics.mean((last - first) / (num - 1) for _, first, last, num in found if num > 1)
    return Figures(total_s, ttft, tpot)


async def _ask(engine: AsyncEngine, arrival: Arrival, started_s: float) -> tuple[float, float, float, int]:
    """When it was due, when its first and last token came, and how many came."""
    loop = asyncio.get_running_loop()
    due_s = started_s + arrival.at_s
    await asyncio.sleep(max(0.0, due_s - loop.time()))
    params = SamplingParams(max_tokens=arrival.num_output, ignore_eos=True, temperature=0.0)
    prompt = TokensPrompt([3 + token % 40_000 for token in arrival.prompt_ids])
    first_s: float | None = None
    async for output in engine.stream(prompt, params, request_id=arrival.request_id):
        if first_s is None and output.num_generated_tokens:
            first_s = loop.time()
    last_s = loop.time()
    return due_s, last_s if first_s is None else first_s, last_s, arrival.num_output


def simulated_figures(trace: Path, cost: CostModel) -> Figures:
    recorded = read_recorded(trace)
    setup = EngineSetup(scheduler=recorded.header.scheduler, cache=_cache(recorded.header))
    run = simulate(setup, cost, recorded, tokens=recorded.tokens)
    columns = columns_of(run.served)
    return Figures(run.duration_s, float(columns.ttft_s.mean()), float(columns.tpot_s[columns.num_output > 1].mean()))


def _cache(header: Header) -> CacheConfig:
    plan = header.kv_plan
    return replace(header.cache, num_pages=plan.num_pages, page_size=plan.page_size)


if __name__ == "__main__":
    sys.exit(main())
