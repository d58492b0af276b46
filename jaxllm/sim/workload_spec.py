"""The section `workload` of a simulation's configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxllm.errors import ConfigError
from jaxllm.sim.agents import AgentShape, AgentWriter
from jaxllm.sim.arrivals import AtOnce, Gamma, Process, Rate, Until
from jaxllm.sim.chats import ChatWriter, DrawnTurns, SeenTurns, System
from jaxllm.sim.conversations import read_conversations
from jaxllm.sim.executor import TokenSource, any_token
from jaxllm.sim.lengths import Constant, FromPairs, Independent, Pairs
from jaxllm.sim.mix import Mix, Prefixes
from jaxllm.sim.mix_spec import classes_of, duration_of, lengths_of
from jaxllm.sim.open_loop import ClosedLoop, OpenLoop
from jaxllm.sim.recorded import Recorded, read_recorded
from jaxllm.sim.section import Section, is_number
from jaxllm.sim.sessions import Sessions, Writer
from jaxllm.sim.trace_files import AZURE, BURSTGPT, Replay, read_trace
from jaxllm.sim.workload import Workload

_MOST_CLIENTS = 10**7
_MOST_TURNS = 10**5  # of a conversation: each carries all before it


def make_workload(spec: Mapping[str, Any], seed: int, where: str, *, folder: Path = Path()) -> Workload:
    """The workload that a section describes; docs/sim-workloads.md lists its keys.

    Args:
        spec: the section; a `Lined` one lets messages name lines.
        where: what messages call it, such as "sim.yaml: workload".
        folder: what the names of files are relative to.

    Raises:
        ConfigError: a key is missing, unknown or wrong, or a file is.
    """
    section = Section(spec, where)
    kind = section.text("kind", choices=tuple(_KINDS))
    workload = _KINDS[kind](section, seed, folder)
    section.done()
    return workload


def tokens_of(workload: Workload) -> TokenSource:
    """What requests are answered with: the recorded tokens of a recorded run, else any."""
    return workload.tokens if isinstance(workload, Recorded) else any_token


def _open_loop(section: Section, seed: int, folder: Path) -> Workload:
    until = _until(section, "num_requests")
    return OpenLoop(_process(section), _mix(section, seed, folder), until, seed=seed)


def _at_once(section: Section, seed: int, folder: Path) -> Workload:
    until = Until(count=section.whole("num_requests", low=1))
    return OpenLoop(AtOnce(), _mix(section, seed, folder), until, seed=seed)


def _closed(section: Section, seed: int, folder: Path) -> Workload:
    concurrency = section.whole("concurrency", low=1, high=_MOST_CLIENTS)
    think_s = duration_of(section, "think_s", Constant(0.0))
    until = _until(section, "num_requests")
    return ClosedLoop(concurrency, _mix(section, seed, folder), until, seed=seed, think_s=think_s)


def _chats(section: Section, seed: int, folder: Path) -> Workload:
    mix = _session_mix(section, seed)
    if "lengths" in section:
        turns = SeenTurns(_read_conversations(section, folder))
    else:
        pairs = Independent(lengths_of(section, "user"), lengths_of(section, "output"))
        turns = DrawnTurns(lengths_of(section, "turns", high=_MOST_TURNS), pairs)
    writer = ChatWriter(
        mix.prompts,
        turns,
        duration_of(section, "think_s", Constant(0.0)),
        seed=seed,
        system=_system(section),
        max_context=section.whole("max_context", None, low=1),
    )
    return _sessions(section, writer, mix, seed)


def _agents(section: Section, seed: int, folder: Path) -> Workload:
    del folder
    mix = _session_mix(section, seed)
    shape = AgentShape(
        task=lengths_of(section, "task"),
        calls=lengths_of(section, "calls", low=0, high=_MOST_TURNS),
        call=lengths_of(section, "call"),
        result=lengths_of(section, "result"),
        answer=lengths_of(section, "answer"),
        pause_s=duration_of(section, "pause_s", Constant(0.0)),
    )
    max_context = section.whole("max_context", None, low=1)
    writer = AgentWriter(mix.prompts, shape, seed=seed, system=_system(section), max_context=max_context)
    return _sessions(section, writer, mix, seed)


def _azure(section: Section, seed: int, folder: Path) -> Workload:
    limit = section.whole("limit", None, low=1)
    rows = read_trace(_file(section, folder), AZURE, limit=limit)
    return Replay(rows, _trace_mix(section, seed), speed=section.number("speed", 1.0, above=0))


def _burstgpt(section: Section, seed: int, folder: Path) -> Workload:
    keys = {"model": "Model", "log_type": "Log Type"}
    only = {column: section.text(key, None) for key, column in keys.items()}
    rows = read_trace(
        _file(section, folder),
        BURSTGPT,
        limit=section.whole("limit", None, low=1),
        only={column: text for column, text in only.items() if text is not None},
    )
    return Replay(rows, _trace_mix(section, seed), speed=section.number("speed", 1.0, above=0))


def _jaxllm_trace(section: Section, seed: int, folder: Path) -> Workload:
    del seed  # nothing is drawn
    limit, speed = section.whole("limit", None, low=1), section.number("speed", 1.0, above=0)
    return read_recorded(_file(section, folder), speed=speed, limit=limit)


_KINDS: dict[str, Callable[[Section, int, Path], Workload]] = {
    "poisson": _open_loop,
    "gamma": _open_loop,
    "at_once": _at_once,
    "closed": _closed,
    "chats": _chats,
    "agents": _agents,
    "azure": _azure,
    "burstgpt": _burstgpt,
    "jaxllm_trace": _jaxllm_trace,
}


# Parts that several kinds have


def _file(section: Section, folder: Path) -> Path:
    path = folder / Path(section.text("file")).expanduser()
    if not path.is_file():
        raise section.fail("file", str(path), "a file that exists")
    return path


def _process(section: Section) -> Process:
    """Of `rate`, and for a gamma process `cv` or `burstiness`."""
    rate = _rate(section)
    if section.text("kind") == "poisson":
        return Gamma(rate)
    return Gamma(rate, _shape(section))


def _shape(section: Section) -> float:
    """`cv`: of the gaps; `burstiness`: 1 / cv**2, as benchmarks call it."""
    if section.one_of("cv", "burstiness") == "burstiness":
        return section.number("burstiness", low=1e-4, high=1e4)
    return 1 / section.number("cv", low=1e-2, high=1e2) ** 2


def _rate(section: Section) -> Rate:
    accepted = "requests a second, above 0, or a list of [seconds, rate] of which one rate is above 0"
    value = section.take("rate", accepted=accepted)
    if is_number(value) and 1e-9 <= value <= 1e9:
        return Rate.constant(float(value))
    steps: list[tuple[float, float]] = []
    for step in value if isinstance(value, list) else [None]:
        if not isinstance(step, list) or len(step) != 2 or not all(is_number(each) for each in step):
            raise section.fail("rate", value, accepted)
        steps.append((float(step[0]), float(step[1])))
    in_bounds = all(0 < seconds <= 1e9 and (rate == 0 or 1e-9 <= rate <= 1e9) for seconds, rate in steps)
    if not in_bounds or not any(rate for _, rate in steps):
        raise section.fail("rate", value, accepted)
    return Rate(tuple(steps))


def _until(section: Section, key: str) -> Until:
    count, duration_s = section.whole(key, None, low=1), section.number("duration_s", None, above=0)
    if count is None and duration_s is None:
        raise ConfigError(f"{section.where}: no end is given; accepted: {key}, duration_s, or both")
    return Until(count=count, duration_s=duration_s)


def _mix(section: Section, seed: int, folder: Path) -> Mix:
    """Of `prompt` and `output`, or `lengths`; `classes`, `prefixes` and `prediction_sigma`."""
    classes = classes_of(section, has_lengths=True)
    pairs: Pairs | None = None
    if "lengths" in section:
        first = (conversation[0] for conversation in _read_conversations(section, folder))
        pairs = FromPairs(tuple(first))
    elif "prompt" in section or "output" in section or any(kind.pairs is None for kind in classes):
        pairs = Independent(lengths_of(section, "prompt"), lengths_of(section, "output"))
    return Mix(seed, pairs=pairs, classes=classes, prefixes=_prefixes(section), prediction_sigma=_sigma(section))


def _session_mix(section: Section, seed: int) -> Mix:
    return Mix(seed, classes=classes_of(section), prediction_sigma=_sigma(section))


_trace_mix = _session_mix


def _sigma(section: Section) -> float | None:
    return section.number("prediction_sigma", None, high=10)


def _prefixes(section: Section) -> Prefixes | None:
    if "prefixes" not in section:
        return None
    inner = section.inner("prefixes")
    prefixes = Prefixes(
        inner.whole("count", low=1, high=10**6),
        inner.whole("tokens", low=1, high=10**7),
        inner.number("skew", 0.0, high=10),
    )
    inner.done()
    return prefixes


def _read_conversations(section: Section, folder: Path) -> Any:
    """Of `lengths`: {file, max_prompt, max_output}."""
    inner = section.inner("lengths")
    path = _file(inner, folder)
    bounds = {key: inner.whole(key, None, low=1) for key in ("max_prompt", "max_output")}
    inner.done()
    return read_conversations(path, **{key: bound for key, bound in bounds.items() if bound is not None})


def _system(section: Section) -> System:
    num_tokens = section.whole("system_tokens", 0, high=10**7)
    return System(num_tokens, section.switch("system_per_tenant", False))


def _sessions(section: Section, writer: Writer, mix: Mix, seed: int) -> Sessions:
    """Conversations that begin at a `rate`, with or without `cv` or `burstiness`, or `concurrency` at a time."""
    until = _until(section, "num_sessions")
    if section.one_of("rate", "concurrency") == "concurrency":
        concurrency = section.whole("concurrency", low=1, high=_MOST_CLIENTS)
        return Sessions(writer, mix, until, seed=seed, concurrency=concurrency)
    is_gamma = "cv" in section or "burstiness" in section
    process = Gamma(_rate(section), _shape(section) if is_gamma else 1.0)
    return Sessions(writer, mix, until, seed=seed, process=process)
