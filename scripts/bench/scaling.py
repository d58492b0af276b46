"""Our step time over batch, context, page size and token budget, beside a cost fitted to bytes and FLOPs.

    scripts/bench/scaling                                   all sweeps: docs/plots/scaling.json and a picture each
    scripts/bench/scaling --only context --dtype bfloat16   one again; the others stay as the file has them

The Runner is driven as the engine drives it, one step at a time, without overlap: what is measured
is the time from a plan to its tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from scripts.bench.compare import machine
from scripts.bench.step_cost import Fit, Rows, StepSize, fit, step_size

if TYPE_CHECKING:
    from jaxllm.config.engine import EngineArgs
    from jaxllm.runner.runner import Runner

_NULL_PAGES = 1
_WARM_STEPS = 2
_MIN_STEPS, _MAX_STEPS = 5, 50


@dataclass(frozen=True, slots=True)
class Sweep:
    name: str
    title: str
    points: tuple[tuple[int, int, Rows], ...]  # value on the axis, page size, rows of the step


def sweeps(page_size: int, longest: int) -> tuple[Sweep, ...]:
    """`longest`: tokens a request may have."""

    def contexts() -> Iterator[int]:
        yield from (c for c in (64, 256, 512, 1024, 2048) if c < longest)
        yield longest

    batches, chunks = (1, 2, 4, 8, 16, 32, 64, 128), (16, 32, 64, 128, 256, 512, 1024, 2048)
    return (
        Sweep("batch", "requests, 256 tokens of context", tuple((n, page_size, Rows(n, 1, 255)) for n in batches)),
        Sweep("context", "tokens of context, 8 requests", tuple((c, page_size, Rows(8, 1, c - 1)) for c in contexts())),
        Sweep(
            "page-size",
            "tokens a page, 16 requests of 1,024",
            tuple((s, s, Rows(16, 1, 1023)) for s in (8, 16, 32, 64, 128)),
        ),
        Sweep("token-budget", "tokens of a prompt in the step", tuple((n, page_size, Rows(1, n, 0)) for n in chunks)),
    )


@dataclass(frozen=True, slots=True)
class Point:
    """One measured kind of step."""

    sweep: str
    value: int
    page_size: int
    rows: Rows
    size: StepSize
    seconds: float  # median of the steps
    least_s: float
    most_s: float
    cpu_s: float  # of the process, a step
    num_steps: int

    @staticmethod
    def of(record: dict[str, Any]) -> Point:
        return Point(**{**record, "rows": Rows(**record["rows"]), "size": StepSize(**record["size"])})


class Steps:
    """Gives a Runner the same step again and again; mutable, owns the Runner's slots and pages."""

    def __init__(self, runner: Runner, page_size: int) -> None:
        self._runner = runner
        self._page_size = page_size
        self._step_id = 0

    def measure(self, rows: Rows, seconds: float) -> tuple[list[float], float]:
        """Wall seconds of each step, and the process's CPU seconds a step. Runs for about `seconds`."""
        self._run(rows, is_first=True)
        for _ in range(_WARM_STEPS):
            self._run(rows)
        walls: list[float] = []
        cpu_s = time.process_time()
        while len(walls) < _MIN_STEPS or (sum(walls) < seconds and len(walls) < _MAX_STEPS):
            start_s = time.perf_counter()
            self._run(rows)
            walls.append(time.perf_counter() - start_s)
        return walls, (time.process_time() - cpu_s) / len(walls)

    def _run(self, rows: Rows, *, is_first: bool = False) -> None:
        """Each request has its own pages from the first step on; their content is whatever was there."""
        from jaxllm.types.step import PageTableDiff, SchedulerOutput

        slots = np.arange(rows.num_rows, dtype=np.int32)
        new, diff = (), PageTableDiff()
        if is_first:
            new = tuple(_new_request(slot, rows) for slot in slots.tolist())
            indices = np.arange(-(-rows.end // self._page_size), dtype=np.int32)
            diff = PageTableDiff(
                np.repeat(slots, len(indices)),
                np.tile(indices, rows.num_rows),
                np.arange(rows.num_rows * len(indices), dtype=np.int32) + _NULL_PAGES,
            )
        self._step_id += 1
        plan = SchedulerOutput(self._step_id, new, _scheduled(slots, rows), (diff,))
        self._runner.collect(self._runner.submit(plan))


def _new_request(slot: int, rows: Rows) -> Any:
    from jaxllm.types.sampling import SamplingParams
    from jaxllm.types.step import NewRequest

    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    token_ids = tuple(100 + (slot + i) % 1000 for i in range(rows.end))
    return NewRequest(str(slot), slot, token_ids, rows.end, params, seed=0, num_cached=rows.start)


def _scheduled(slots: np.ndarray[Any, Any], rows: Rows) -> Any:
    from jaxllm.types.step import ScheduledRows

    return ScheduledRows(
        request_ids=tuple(str(slot) for slot in slots.tolist()),
        slots=slots,
        starts=np.full(rows.num_rows, rows.start, np.int32),
        num_tokens=np.full(rows.num_rows, rows.num_tokens, np.int32),
        samples=np.ones(rows.num_rows, np.bool_),
        num_decode=rows.num_rows if rows.num_tokens == 1 else 0,
    )


def engine_args(points: Iterable[tuple[int, Rows]], **settings: Any) -> EngineArgs:
    """Settings that hold every (page size, rows) of `points`, which have the page size in common, and no more."""
    from jaxllm.config.engine import EngineArgs

    sizes, all_rows = zip(*points, strict=True)
    page_size = sizes[0]
    return EngineArgs(
        page_size=page_size,
        max_num_seqs=max(rows.num_rows for rows in all_rows),
        max_num_batched_tokens=max(32, *(rows.num_rows * rows.num_tokens for rows in all_rows)),
        max_model_len=max(rows.end for rows in all_rows) + 1,
        num_pages=_NULL_PAGES + max(rows.num_rows * (-(-rows.end // page_size) + 1) for rows in all_rows),
        **settings,
    )


def measure(wanted: Sequence[Sweep], seconds: float, **settings: Any) -> list[Point]:
    """Every point of `wanted`. Sweeps of one page size share an engine; the one over page sizes has one for each."""
    from jaxllm.build import build_parts

    by_engine: dict[tuple[int, bool], list[tuple[str, int, Rows]]] = {}
    for sweep in wanted:
        has_own_engines = len({page_size for _, page_size, _ in sweep.points}) > 1
        for value, page_size, rows in sweep.points:
            by_engine.setdefault((page_size, has_own_engines), []).append((sweep.name, value, rows))
    points: list[Point] = []
    for (page_size, _), mine in by_engine.items():
        args = engine_args([(page_size, rows) for _, _, rows in mine], **settings)
        runner = cast("Runner", build_parts(args).executor)
        steps = Steps(runner, page_size)
        for name, value, rows in mine:
            walls, cpu_s = steps.measure(rows, seconds)
            size = step_size(runner, rows, page_size)
            middle = statistics.median(walls)
            points.append(Point(name, value, page_size, rows, size, middle, min(walls), max(walls), cpu_s, len(walls)))
            print(
                f"{name} {value}: {middle * 1e3:.2f} ms ({min(walls) * 1e3:.2f} to {max(walls) * 1e3:.2f})", flush=True
            )
        runner.close()
    return points


def read_points(path: Path, settings: dict[str, Any]) -> list[Point]:
    """What a file holds, if it was measured with the same settings."""
    if not path.exists():
        return []
    found = json.loads(path.read_text())
    return [Point.of(record) for record in found["points"]] if found["settings"] == settings else []


def write(path: Path, settings: dict[str, Any], points: Sequence[Point], found: Fit) -> None:
    fields = {"settings": settings, "machine": machine(), "fit": asdict(found)}
    lines = ",\n".join(f"  {json.dumps(asdict(point))}" for point in points)
    head = "".join(f' "{name}": {json.dumps(value)},\n' for name, value in fields.items())
    path.write_text(f'{{\n{head} "points": [\n{lines}\n ]\n}}\n')


def summary(found: Fit, weight_bytes: int) -> str:
    def rate(value: float | None, unit: str) -> str:
        return f"{value / 1e9:.3g} {unit}" if value else "not seen"

    weights = rate(weight_bytes / found.fixed_s if found.fixed_s else None, "GB/s")
    return (
        f"fixed {found.fixed_s * 1e3:.2f} ms (the weights at {weights}), KV pages {rate(found.kv_bytes_s, 'GB/s')}, "
        f"computing {rate(found.flops_s, 'GFLOP/s')}; errors {found.mean_error:.0%} mean, {found.max_error:.0%} at most"
    )


def plot_sweep(sweep: Sweep, points: Sequence[Point], found: Fit, path: Path) -> None:
    """Measured (median, least to most) and fitted step time over one sweep."""
    from scripts.bench.plot import load_pyplot

    pyplot = load_pyplot()
    figure, axis = pyplot.subplots(figsize=(4.2, 3.0))
    values, middles = [p.value for p in points], [p.seconds * 1e3 for p in points]
    below = [(p.seconds - p.least_s) * 1e3 for p in points]
    above = [(p.most_s - p.seconds) * 1e3 for p in points]
    axis.errorbar(values, middles, yerr=[below, above], marker="o", markersize=4, capsize=2, label="measured")
    axis.plot(values, [found.seconds(p.size) * 1e3 for p in points], linestyle="--", label="fitted")
    axis.set(xlabel=sweep.title, ylabel="ms a step", xscale="log", yscale="log")
    axis.set_xticks(values, [str(value) for value in values], fontsize=7)
    axis.minorticks_off()
    axis.legend(fontsize=7)
    axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    pyplot.close(figure)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    names = [sweep.name for sweep in sweeps(16, 4000)]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder, .gguf file, Hub id or alias; default: the default model")
    parser.add_argument("--load-format", choices=("auto", "dummy"), default="auto", help="dummy: random weights")
    parser.add_argument("--dtype", default="float32", help="of weights and activations (%(default)s)")
    parser.add_argument("--page-size", type=int, default=16, help="of all sweeps but its own (%(default)s)")
    parser.add_argument("--longest", type=int, default=4000, help="tokens of the longest context (%(default)s)")
    parser.add_argument("--only", action="append", choices=names, help="this sweep; may be given again")
    parser.add_argument("--seconds", type=float, default=1.0, help="spent on a point, at least 5 steps (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("docs/plots"), help="folder (%(default)s)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    wanted = [s for s in sweeps(args.page_size, args.longest) if args.only is None or s.name in args.only]
    engine = {"model": args.model, "load_format": args.load_format, "dtype": args.dtype}
    settings = {**engine, "page_size": args.page_size, "longest": args.longest}
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "scaling.json"
    kept = [p for p in read_points(path, settings) if p.sweep not in {sweep.name for sweep in wanted}]
    points = [*kept, *measure(wanted, args.seconds, **engine)]
    found = fit([p.size for p in points], [p.seconds for p in points])
    write(path, settings, points, found)
    for sweep in sweeps(args.page_size, args.longest):
        if mine := [p for p in points if p.sweep == sweep.name]:
            plot_sweep(sweep, mine, found, args.out / f"scaling-{sweep.name}.png")
    print(summary(found, points[0].size.weight_bytes))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
