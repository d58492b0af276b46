"""`jaxllm simulate`: the scheduler on a modelled device, from one engine to a fleet. Needs no model and no device."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from jaxllm.cli.flags import Flag, parse
from jaxllm.errors import ConfigError

if TYPE_CHECKING:
    from jaxllm.sim.config import Simulation
    from jaxllm.sim.metrics import Outcome

_MOST_WORKERS = 256  # each is a process
_FLAGS = [
    Flag("file", "text", "YAML file that says what is simulated (docs/simulator.md)", positional=True),
    Flag("json", "text", "write the figures of each run as JSON to this file; -: to stdout"),
    Flag(
        "plot",
        "text",
        "draw latencies, queue, memory and requests into this file, .png, .svg or .pdf",
    ),
    Flag("html", "text", "write a report into this file, whole in itself"),
    Flag("capacity", "switch", "look for the cheapest fleet among the candidates of the file", False),
    Flag("workers", "count", "processes that share the replicas of a fleet; the result is the same", 1),
    Flag("checkpoint", "text", "save what is running beside this name now and then, and go on from there"),
]


def main(argv: list[str]) -> int:
    values = parse("simulate", __doc__ or "", _FLAGS, argv)
    if values["file"] is None:
        raise ConfigError("simulate needs a file; accepted: the name of a YAML file")
    if not 1 <= values["workers"] <= _MOST_WORKERS:
        raise ConfigError(f"workers={values['workers']}; accepted: at least 1, at most {_MOST_WORKERS}")
    from jaxllm.sim.config import load_simulation

    simulation = load_simulation(values["file"])
    paths = {name: _path(values[name]) for name in ("json", "plot", "html", "checkpoint")}
    _check_paths(paths, simulation.path)
    if values["capacity"]:
        return _capacity(simulation, values["workers"], paths)
    outcomes = _run(simulation, values["workers"], paths["checkpoint"])
    _write(outcomes, simulation, paths)
    return 0


def _capacity(simulation: Simulation, num_workers: int, paths: dict[str, Path | None]) -> int:
    """1 if no candidate is enough."""
    from rich.console import Console

    from jaxllm.sim.capacity import capacity_json, capacity_table, plan_capacity
    from jaxllm.sim.report import write_text

    for name in ("plot", "html", "checkpoint"):
        if paths[name] is not None:
            raise ConfigError(f"{name}={str(paths[name])!r} goes with a run, not with capacity; accepted: json")
    choices = plan_capacity(simulation, num_workers=num_workers)
    is_stdout = str(paths["json"]) == "-"
    Console(stderr=is_stdout).print(capacity_table(choices))
    text = json.dumps(capacity_json(choices))
    if is_stdout:
        print(text)
    elif paths["json"] is not None:
        write_text("json", paths["json"], text + "\n")
    return 0 if choices[0].num_replicas is not None else 1


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text).expanduser()


def _check_paths(paths: dict[str, Path | None], config: Path) -> None:
    """Told of now: a run may take long."""
    from jaxllm.bench.results import check_writable
    from jaxllm.sim.plots import check_plot

    taken = {config.resolve(): "the file that is simulated"}
    for name, path in paths.items():
        if path is None or (name == "json" and str(path) == "-"):
            continue
        if str(path) == "-":
            raise ConfigError(f"{name}='-'; accepted: the name of a file (json alone can go to stdout)")
        check_writable(name, path)
        if (other := taken.setdefault(path.resolve(), name)) != name:
            raise ConfigError(f"{name}={str(path)!r} is {other} too; accepted: another file")
    if paths["plot"] is not None:
        check_plot(paths["plot"])


def _run(simulation: Simulation, num_workers: int, checkpoint: Path | None) -> list[Outcome]:
    from jaxllm.sim.experiment import run_all

    total = len(simulation.policies) * len(simulation.seeds)
    done: list[str] = []

    def on_run(policy: str, seed: int) -> None:
        done.append(policy)
        if total > 1 and sys.stderr.isatty():
            print(f"run {len(done)} of {total}: {policy}, seed {seed}", file=sys.stderr)

    return list(run_all(simulation, num_workers=num_workers, checkpoint=checkpoint, on_run=on_run))


def _write(outcomes: list[Outcome], simulation: Simulation, paths: dict[str, Path | None]) -> None:
    from rich.console import Console

    from jaxllm.sim.html import write_html
    from jaxllm.sim.plots import plot
    from jaxllm.sim.report import as_json, tables, write_json

    summaries = [outcome.summary for outcome in outcomes]
    is_stdout = str(paths["json"]) == "-"
    console = Console(stderr=is_stdout)
    for table in tables(summaries):
        console.print(table)
    if is_stdout:
        print(json.dumps(as_json(summaries)))
    elif paths["json"] is not None:
        write_json(summaries, paths["json"])
    if paths["plot"] is not None:
        plot(outcomes, paths["plot"], simulation.slo)
    if paths["html"] is not None:
        write_html(outcomes, paths["html"], title=simulation.path.name, config=simulation.text, slo=simulation.slo)
