"""`jaxllm bench`: measure. latency and throughput of a model here, load on any server, start-up, host cost."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxllm.bench.results import Results, result_file
from jaxllm.cli.flags import Flag, parse, schema_flags
from jaxllm.cli.report import progress_bars
from jaxllm.config.engine import EngineArgs
from jaxllm.errors import ConfigError

if TYPE_CHECKING:
    from jaxllm.bench.datasets import DatasetArgs
    from jaxllm.bench.serve import Target
    from jaxllm.bench.serve_args import ServeArgs
    from jaxllm.bench.serve_result import ServeResult
    from jaxllm.tokenizer.base import Tokenizer
    from jaxllm.types.profile import ProfileSummary

_SAY_EVERY_S = 1.0
_OUT_FLAGS = [
    Flag("json", "text", "write the result as JSON to this file; -: to stdout", None, ("output-json",)),
    Flag("plot", "text", "draw the result into this file, .png, .svg or .pdf (needs jaxllm[bench])"),
]


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0 if argv else 2
    kind, *rest = argv
    if kind not in KINDS:
        raise ConfigError(f"bench has no {kind!r}; accepted: {', '.join(KINDS)}")
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    return KINDS[kind][0](rest)


def _usage() -> str:
    width = max(map(len, KINDS))
    lines = [f"  {name:<{width}}  {about}" for name, (_, about) in KINDS.items()]
    return "\n".join(
        ["usage: jaxllm bench KIND [MODEL] [flags]", "", *lines, "", "`jaxllm bench KIND --help` lists the flags."]
    )


def _latency(argv: list[str]) -> int:
    from jaxllm.bench.latency import LatencyArgs, run_latency

    values = _parse("latency", argv, [LatencyArgs, EngineArgs], changed={"enable_prefix_caching": False})
    args, flags = _made(LatencyArgs, values), _engine_flags(values)
    results = _results("latency", values, [args, _made(EngineArgs, values)])
    from jaxllm.llm import LLM

    with progress_bars() as progress, LLM(progress=progress, **flags) as llm:
        result = run_latency(llm, args, seed=flags["seed"], progress=progress)
    results.add("", result.rows())
    _add_profile(results, result.profile)

    def plot(path: Path) -> None:
        from jaxllm.bench.plots import plot_latency

        plot_latency(result, path)

    results.write(result.as_dict(), plot)
    return 0


def _throughput(argv: list[str]) -> int:
    from jaxllm.bench.datasets import DatasetArgs, make_requests
    from jaxllm.bench.throughput import ThroughputArgs, run_throughput

    values = _parse("throughput", argv, [ThroughputArgs, DatasetArgs, EngineArgs])
    args, dataset = _made(ThroughputArgs, values), _made(DatasetArgs, values)
    flags = _engine_flags(values)
    results = _results("throughput", values, [args, dataset, _made(EngineArgs, values)])
    from jaxllm.llm import LLM

    with progress_bars() as progress, LLM(progress=progress, **flags) as llm:
        requests = make_requests(dataset, llm.tokenizer, args.num_warmups)
        result = run_throughput(llm, args, requests, progress=progress)
    results.add("", result.rows())
    _add_profile(results, result.profile)

    def plot(path: Path) -> None:
        from jaxllm.bench.plots import plot_throughput

        plot_throughput(result, path)

    results.write(result.as_dict(), plot)
    return 1 if result.num_failed and not result.num_requests else 0


def _serve(argv: list[str]) -> int:
    from jaxllm.bench.datasets import DatasetArgs, make_requests
    from jaxllm.bench.serve import find_target, run_serve
    from jaxllm.bench.serve_args import ServeArgs
    from jaxllm.bench.serve_result import ServeResult

    values = _parse("serve", argv, [ServeArgs, DatasetArgs])
    args, dataset = _made(ServeArgs, values), _made(DatasetArgs, values)
    results = _results("serve", values, [args, dataset])
    target = find_target(args)
    saved_path = result_file(args, target.model) if args.save_result or args.save_detailed else None
    requests = make_requests(dataset, _tokenizer(args, dataset, target), args.num_warmups)
    if len(requests) <= args.num_warmups:
        raise ConfigError(f"num_warmups={args.num_warmups} leaves none of {len(requests)} requests; accepted: fewer")
    on_end = _announcer(len(requests) - args.num_warmups)
    run = run_serve(args, target, requests, seed=dataset.seed, on_end=on_end)
    result = ServeResult.of(run, percentiles=args.percentiles, slos=args.slos)
    results.add("", result.rows(args.shown_metrics))
    _write_serve(results, args, target, result, saved_path)
    return 1 if not result.num_completed else 0


def _write_serve(
    results: Results, args: ServeArgs, target: Target, result: ServeResult, saved_path: Path | None
) -> None:
    about = {
        "backend": args.backend,
        "base_url": target.address.url,
        "label": args.label,
        "model_id": target.model,
        "num_prompts": len(result.answers),
        "request_rate": str(args.request_rate),
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
        **args.notes,
    }

    def plot(path: Path) -> None:
        from jaxllm.bench.plots import plot_serve

        plot_serve(result, path)

    results.write({**about, **result.as_dict()}, plot)
    if saved_path is not None:
        results.save(saved_path, {**about, **result.as_dict(detailed=args.save_detailed)})
    for warning in result.warnings():
        print(f"jaxllm: note: {warning}", file=sys.stderr)


def _tokenizer(args: ServeArgs, dataset: DatasetArgs, target: Target) -> Tokenizer | None:
    from jaxllm.build import resolve_tokenizer
    from jaxllm.tokenizer.load import load_tokenizer

    if dataset.dataset_name == "custom" and args.tokenizer is None:
        return None
    name = args.tokenizer or args.model or target.model
    try:
        path = resolve_tokenizer(name)
    except ConfigError as error:
        if args.tokenizer is not None:
            raise
        raise ConfigError(f"no tokenizer for the model {name!r} is here ({error}); give --tokenizer FOLDER") from None
    return load_tokenizer(path)


def _announcer(total: int) -> Callable[[], None] | None:
    """Says on a terminal how far the load is, seldom: the client has something else to do."""
    if not sys.stderr.isatty():
        return None
    num_done, said_s = 0, time.monotonic()

    def announce() -> None:
        nonlocal num_done, said_s
        num_done += 1
        now_s = time.monotonic()
        if now_s - said_s >= _SAY_EVERY_S or num_done == total:
            said_s = now_s
            print(f"\r{num_done} of {total} requests", end="\n" if num_done == total else "", file=sys.stderr)

    return announce


def _startup(argv: list[str]) -> int:
    from jaxllm.bench.startup import StartupArgs, run_startup

    values = _parse("startup", argv, [StartupArgs, EngineArgs])
    args, flags = _made(StartupArgs, values), _engine_flags(values)
    results = _results("startup", values, [args, _made(EngineArgs, values)])
    with progress_bars() as progress:
        result = run_startup(args, flags, progress=progress)
    results.add("", result.rows())
    results.add("", result.phase_rows())

    def plot(path: Path) -> None:
        from jaxllm.bench.plots import plot_startup

        plot_startup(result, path)

    results.write(result.as_dict(), plot)
    return 0


def _scheduler(argv: list[str]) -> int:
    from jaxllm.bench.scheduler import SchedulerArgs, run_scheduler

    values = _parse("scheduler", argv, [SchedulerArgs])
    args = _made(SchedulerArgs, values)
    results = _results("scheduler", values, [args])
    with progress_bars() as progress:
        result = run_scheduler(args, progress=progress)
    results.add("CPU time of a decode step, median (lowest to highest)", result.rows())
    if result.policies:
        heading = f"CPU time of a decode step by policy, {args.counts[0]} running, {args.num_waiting} waiting or none"
        results.add(heading, result.policy_rows())
    if result.busy:
        results.add("A device of a fixed speed", result.busy_rows())
        results.add("Where a step's time goes, next step planned meanwhile", result.busy[0].profile.rows())
    if result.prefix_cache is not None:
        results.add("", result.prefix_rows())

    def plot(path: Path) -> None:
        from jaxllm.bench.plots import plot_scheduler

        plot_scheduler(result, path)

    results.write(result.as_dict(), plot)
    return 0


KINDS: dict[str, tuple[Callable[[list[str]], int], str]] = {
    "latency": (_latency, "how long one batch takes, in this process"),
    "throughput": (_throughput, "how much is done when everything is asked at once, in this process"),
    "serve": (_serve, "load on any OpenAI-compatible server"),
    "startup": (_startup, "what starting costs, with and without compiled programs on disk"),
    "scheduler": (_scheduler, "what the host costs, without a model"),
}


def _parse(
    kind: str, argv: Sequence[str], schemas: Sequence[type[Any]], changed: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Flags of `schemas`; where two share a name, the first one's holds. A model may be named first, bare."""
    if argv and not argv[0].startswith("-") and any(f.name == "model" for schema in schemas for f in fields(schema)):
        argv = ["--model", *argv]
    flags = [flag for schema in schemas for flag in schema_flags(schema)]
    flags = [replace(f, default=changed[f.name]) if changed and f.name in changed else f for f in flags]
    about = f"{KINDS[kind][1][0].upper()}{KINDS[kind][1][1:]}. See docs/bench.md."
    return parse(f"bench {kind}", about, [*_OUT_FLAGS, *flags], argv, schemas=schemas)


def _made(schema: type[Any], values: dict[str, Any]) -> Any:
    return schema(**{f.name: values[f.name] for f in fields(schema)})


def _engine_flags(values: dict[str, Any]) -> dict[str, Any]:
    """Checked now: a wrong flag should not cost a start-up."""
    args = _made(EngineArgs, values)
    return {f.name: getattr(args, f.name) for f in fields(EngineArgs)}


def _results(kind: str, values: dict[str, Any], args: Sequence[Any]) -> Results:
    json_path = values["json"]
    plot = None if values["plot"] is None else Path(values["plot"]).expanduser()
    return Results(kind, json_path, plot, args, model=values.get("model"))


def _add_profile(results: Results, profile: ProfileSummary | None) -> None:
    if profile is not None:
        title = f"Where the time of {profile.count} steps goes; device busy {profile.busy_share:.1%} of it"
        results.add(title, profile.rows())
