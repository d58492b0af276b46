"""Requests that a real engine was recorded with, and what it answered."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jaxllm.engine.messages import AddRequest
from jaxllm.engine.trace import Aborted, Arrived, Collected, Decision, Header, Line, Planned
from jaxllm.engine.trace_file import read_trace
from jaxllm.errors import ConfigError
from jaxllm.scheduler.limits import Deadlines
from jaxllm.scheduler.repetition import RepetitionWatches
from jaxllm.scheduler.stop import StopRules
from jaxllm.sim.executor import any_token
from jaxllm.sim.workload import Arrival
from jaxllm.types.request import Request


@dataclass(frozen=True, slots=True)
class RecordedTokens:
    """A `TokenSource`: what was recorded for that place, and any token where nothing was."""

    answers: Mapping[str, tuple[int, tuple[int, ...]]]  # by request: length of the prompt, output ids

    def __call__(self, request_id: str, position: int) -> int:
        num_prompt, output_ids = self.answers.get(request_id, (0, ()))
        index = position - num_prompt
        return output_ids[index] if 0 <= index < len(output_ids) else any_token(request_id, position)


class Recorded:
    """Implements `Workload`: the requests of a recorded run, in order of their arrival. Frozen.

    Requests are answered with as many tokens as they were, and `tokens` are those. They come under
    their own ids; siblings of one prompt come as requests of their own. Those that got no answer are
    left out: refused, aborted before their first token, or open when the recording ended.
    """

    def __init__(self, arrivals: Sequence[Arrival], tokens: RecordedTokens, num_left_out: int, header: Header) -> None:
        self.tokens = tokens
        self.num_left_out = num_left_out
        self.header = header  # the scheduler and the memory it was recorded with
        self._arrivals = tuple(arrivals)

    def start(self) -> Iterable[Arrival]:
        return self._arrivals

    def ended(self, arrival: Arrival, at_s: float, output_ids: Sequence[int]) -> Sequence[Arrival]:
        del arrival, at_s, output_ids
        return ()


def read_recorded(path: str | Path, *, speed: float = 1.0, limit: int | None = None) -> Recorded:
    """A file of `--record-trace`; the first `limit` requests of it, that come `speed` times as fast from 0 on.

    Raises:
        ConfigError: the file cannot be read or is none, or no request in it was answered.
    """
    header, lines = read_trace(path)
    reader = _Reader(header)
    for number, line in lines:
        try:
            reader.take(line)
        except _Wrong as wrong:
            raise ConfigError(f"trace {str(path)!r}, line {number}: {wrong}") from None
    answers = [answer for answer in reader.answers.values() if answer.request.output_ids]
    if not answers:
        raise ConfigError(f"trace {str(path)!r} has no request that was answered; accepted: at least one")
    answers.sort(key=lambda answer: answer.request.arrival_s)
    first_s = answers[0].request.arrival_s
    kept = answers[:limit]
    tokens = RecordedTokens(
        {a.request.request_id: (len(a.request.prompt_ids), tuple(a.request.output_ids)) for a in kept}
    )
    arrivals = [_arrival(answer.request, (answer.request.arrival_s - first_s) / speed) for answer in kept]
    return Recorded(arrivals, tokens, len(reader.answers) - len(answers), header)


def _arrival(request: Request, at_s: float) -> Arrival:
    return Arrival(
        at_s,
        request.request_id,
        request.prompt_ids,
        len(request.output_ids),
        request.priority,
        request.service,
        request.cache_salt,
    )


class _Wrong(Exception):
    """What a line says that cannot be."""


@dataclass(slots=True)
class _Answer:
    """What a request was answered with. Mutable."""

    request: Request
    is_over: bool = False  # what comes for it is dropped, as the engine did


@dataclass(slots=True)
class _Reader:
    """Puts answers together, with the engine's own rules for their end. Mutable; of one file."""

    header: Header
    answers: dict[str, _Answer] = field(default_factory=dict[str, _Answer])
    _decisions: dict[int, Decision] = field(default_factory=dict[int, Decision])  # of steps in flight
    _repetition: RepetitionWatches = field(default_factory=RepetitionWatches)
    _stop: StopRules = field(init=False)
    _deadlines: Deadlines = field(init=False)

    def __post_init__(self) -> None:
        config = self.header.scheduler
        self._stop = StopRules(frozenset(self.header.eos_ids), config.max_model_len)
        self._deadlines = Deadlines(config.default_deadline_s)

    def take(self, line: Line) -> None:
        match line:
            case Arrived():
                if line.request.request_id in self.answers:
                    raise _Wrong(f"request_id={line.request.request_id!r} a second time; accepted: new ones")
                request = _request(line.request)
                self.answers[request.request_id] = _Answer(request)
                self._deadlines.add(request)
            case Aborted():
                self._end(line.request_ids)
            case Planned():
                self._end(request.request_id for request in self._deadlines.take(line.now_s))
                if line.decision is not None:
                    self._decisions[line.decision.step] = line.decision
                    self._end(line.decision.finished)
            case Collected():
                self._collect(line)
            case _:
                pass

    def _end(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            if request_id in self.answers:
                self.answers[request_id].is_over = True

    def _collect(self, line: Collected) -> None:
        decision = self._decisions.pop(line.step, None)
        if decision is None:
            raise _Wrong(f"step={line.step} was collected and not planned")
        drafts = decision.draft_ids or ((),) * len(decision.request_ids)
        for request_id, start, num_tokens, row_drafts in zip(
            decision.request_ids, decision.starts, decision.num_tokens, drafts, strict=False
        ):
            answer = self.answers.get(request_id)
            if answer is None:
                raise _Wrong(f"request_id={request_id!r} was served and did not arrive")
            for offset, token in enumerate(line.tokens.get(request_id, ())):
                self._put(answer, start + num_tokens - len(row_drafts) + offset, token)

    def _put(self, answer: _Answer, position: int, token: int) -> None:
        """A token at its position, where the tokens of prompt and output are numbered from 0."""
        request = answer.request
        index = position - len(request.prompt_ids)
        if answer.is_over:
            return
        if not 0 <= index <= len(request.output_ids):
            raise _Wrong(f"request_id={request.request_id!r}: a token at {position}; accepted: {request.num_tokens}")
        if index < len(request.output_ids):  # dropped with its step when the request was preempted, and sampled again
            request.output_ids[index] = token
            return
        request.output_ids.append(token)
        repeats = self._repetition.push(request, token)
        answer.is_over = self._stop.check(request, repeats=repeats) is not None


def _request(message: AddRequest) -> Request:
    return Request(
        request_id=message.request_id,
        prompt_ids=message.prompt_ids,
        params=message.params,
        arrival_s=message.arrival_s,
        priority=message.priority,
        cache_salt=message.cache_salt,
        service=message.service,
    )
