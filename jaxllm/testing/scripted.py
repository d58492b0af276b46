"""An executor that says what a script says: no model, no jax, any fault on demand.

`jaxllm serve --executor scripted:FILE.json` serves it. The file is one JSON object:

    {
      "responses": [
        {"prompt_contains": "capital of France", "text": " Paris."},
        {"prompt_starts_with_ids": [1, 2], "token_ids": [3, 4, 5]},
        {"prompt_contains_ids": [7, 8], "token_ids": [9], "repeat": true},
        {"text": "the first request that no condition claims gets this"}
      ],
      "default": {"text": "Hello"},
      "step_s": 0.01,
      "faults": [{"step": 3, "kind": "raise", "where": "collect"}],
      "max_model_len": 2048,
      "repeat": false
    }

Every key may be left out. A response has either "token_ids" or "text" (tokenised without special
tokens). The first response whose conditions all hold answers a request. Responses without a
condition answer one request each, in order of arrival, among those no condition claimed; when
they are used up, "default" answers (without one: the end-of-sequence token at once). After its
last token a response emits the end-of-sequence id for ever, or starts again with "repeat".

"step_s" is the seconds a step takes. A fault happens in the "step"-th step (1 is the first):
"kind" is "raise" (an exception), "freeze" (the call never returns) or "die" (SystemExit, which
ends the thread); "where" is "collect" (the default) or "submit". "max_model_len" is what the
engine serves with.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from jaxllm.engine.executor import Ticket
from jaxllm.errors import ConfigError
from jaxllm.testing.faults import Fault, FaultInjector, FaultPlace
from jaxllm.types.step import NewRequest, SchedulerOutput, StepOutput

Encode = Callable[[str], Sequence[int]]
Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class Script:
    """What to answer, and to which prompts (no condition: see the module's text)."""

    token_ids: tuple[int, ...] = ()
    repeat: bool = False
    prompt_starts_with_ids: tuple[int, ...] | None = None
    prompt_contains_ids: tuple[int, ...] | None = None
    prompt_contains: str | None = None

    @property
    def has_condition(self) -> bool:
        conditions = (self.prompt_starts_with_ids, self.prompt_contains_ids, self.prompt_contains)
        return any(condition is not None for condition in conditions)

    def accepts(self, prompt_ids: tuple[int, ...], text: str) -> bool:
        starts, inside = self.prompt_starts_with_ids, self.prompt_contains_ids
        return (
            (starts is None or prompt_ids[: len(starts)] == starts)
            and (inside is None or _contains(prompt_ids, inside))
            and (self.prompt_contains is None or self.prompt_contains in text)
        )

    def token(self, index: int, eos_id: int) -> int:
        """The output token at `index`, counted from 0."""
        if self.repeat and self.token_ids:
            return self.token_ids[index % len(self.token_ids)]
        return self.token_ids[index] if index < len(self.token_ids) else eos_id


@dataclass(slots=True)
class _Row:
    """A request on the stand-in device."""

    script: Script
    num_prompt_tokens: int
    next_start: int  # position that its next step must start at


@dataclass(frozen=True, slots=True)
class _Step:
    ordinal: int  # 1 for the first submitted
    output: StepOutput
    ready_s: float


@dataclass(slots=True)
class _Choice:
    """Which script answers whom. Mutable; owned by one executor."""

    conditional: tuple[Script, ...]
    in_order: list[Script]
    default: Script
    decode: Decode | None
    by_request: dict[str, Script] = field(default_factory=dict[str, Script])

    def script_for(self, new: NewRequest) -> Script:
        """The same script each time a request enters a slot, also after preemption."""
        chosen = self.by_request.get(new.request_id)
        if chosen is None:
            chosen = self._choose(new.token_ids[: new.num_prompt_tokens])
            self.by_request[new.request_id] = chosen
        return chosen

    def _choose(self, prompt_ids: tuple[int, ...]) -> Script:
        text = self.decode(prompt_ids) if self.decode is not None else ""
        for script in self.conditional:
            if script.accepts(prompt_ids, text):
                return script
        return self.in_order.pop(0) if self.in_order else self.default


class ScriptedExecutor:
    """Implements `Executor`. Mutable; owned by the engine core.

    The token of a step is found from its position, not from a count of calls: a preempted and
    recomputed request goes on where it was, and steps in flight need no care.
    """

    def __init__(
        self,
        responses: Sequence[Script] = (),
        *,
        eos_id: int,
        default: Script | None = None,
        step_s: float = 0.0,
        faults: Sequence[Fault] = (),
        max_model_len: int = 2048,
        decode: Decode | None = None,
    ) -> None:
        """`decode` is needed only for scripts with `prompt_contains`."""
        self.max_model_len = max_model_len
        self._eos_id = eos_id
        self._step_s = step_s
        self._injector = FaultInjector(faults)
        self._choice = _Choice(
            conditional=tuple(s for s in responses if s.has_condition),
            in_order=[s for s in responses if not s.has_condition],
            default=default or Script(),
            decode=decode,
        )
        self._rows: dict[str, _Row] = {}
        self._num_submitted = 0
        self._busy_until_s = 0.0

    @classmethod
    def from_file(
        cls, path: str | Path, *, encode: Encode, eos_id: int, decode: Decode | None = None
    ) -> ScriptedExecutor:
        """Raises: ConfigError: the file cannot be read, or a key or value in it is wrong (it is named)."""
        script_file = _read(Path(path))
        responses = [_script(r, script_file.repeat, encode) for r in script_file.responses]
        if decode is None and any(r.prompt_contains is not None for r in responses):
            raise ConfigError(f"{path}: prompt_contains needs a tokenizer that decodes prompts")
        return cls(
            responses,
            eos_id=eos_id,
            default=_script(script_file.default, script_file.repeat, encode) if script_file.default else None,
            step_s=script_file.step_s,
            faults=script_file.faults,
            max_model_len=script_file.max_model_len,
            decode=decode,
        )

    def submit(self, plan: SchedulerOutput) -> Ticket:
        self._num_submitted += 1
        self._injector.reach(self._num_submitted, FaultPlace.SUBMIT)
        for request_id in plan.finished:
            self._rows.pop(request_id, None)
            self._choice.by_request.pop(request_id, None)
        for new in plan.new:
            script = self._choice.script_for(new)
            self._rows[new.request_id] = _Row(script, new.num_prompt_tokens, new.num_cached)
        tokens = self._tokens(plan)
        self._busy_until_s = max(self._busy_until_s, time.monotonic()) + self._step_s
        step = _Step(self._num_submitted, StepOutput(plan.step_id, tokens), self._busy_until_s)
        return Ticket(plan.step_id, step)

    def collect(self, ticket: Ticket) -> StepOutput:
        step: _Step = ticket.handle
        self._injector.reach(step.ordinal, FaultPlace.COLLECT)
        wait_s = step.ready_s - time.monotonic()
        if wait_s > 0:
            time.sleep(wait_s)
        return step.output

    def release(self) -> None:
        """Let a frozen call go on (it raises), for instance at the end of a test."""
        self._injector.release()

    def close(self) -> None:
        self._injector.release()

    def _tokens(self, plan: SchedulerOutput) -> dict[str, tuple[int, ...]]:
        rows = plan.rows
        tokens: dict[str, tuple[int, ...]] = {}
        columns = (rows.starts.tolist(), rows.num_tokens.tolist(), rows.samples.tolist())
        for request_id, start, num_tokens, samples in zip(rows.request_ids, *columns, strict=True):
            row = self._rows[request_id]
            if start != row.next_start:
                raise RuntimeError(
                    f"step {plan.step_id} starts {request_id!r} at position {start}, not at {row.next_start}"
                )
            row.next_start = start + num_tokens
            if samples:
                index = row.next_start - row.num_prompt_tokens
                tokens[request_id] = (row.script.token(index, self._eos_id),)
        return tokens


class _ResponseEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    token_ids: tuple[int, ...] | None = None
    text: str | None = None
    prompt_starts_with_ids: tuple[int, ...] | None = None
    prompt_contains_ids: tuple[int, ...] | None = None
    prompt_contains: str | None = None
    repeat: bool | None = None


class _ScriptFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    responses: tuple[_ResponseEntry, ...] = ()
    default: _ResponseEntry | None = None
    step_s: float = 0.0
    faults: tuple[Fault, ...] = ()
    max_model_len: int = 2048
    repeat: bool = False


def _read(path: Path) -> _ScriptFile:
    try:
        script_file = msgspec.json.decode(path.read_bytes(), type=_ScriptFile)
    except OSError as error:
        raise ConfigError(f"script file {path} cannot be read: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"script file {path}: {error}; accepted keys: {', '.join(_keys())}") from None
    for number, response in enumerate(script_file.responses):
        if response.token_ids is not None and response.text is not None:
            raise ConfigError(f"script file {path}: responses[{number}] has both token_ids and text; accepted: one")
    return script_file


def _keys() -> tuple[str, ...]:
    return _ScriptFile.__struct_fields__ + _ResponseEntry.__struct_fields__ + Fault.__struct_fields__


def _script(response: _ResponseEntry, repeat: bool, encode: Encode) -> Script:
    ids = tuple(encode(response.text)) if response.text is not None else response.token_ids or ()
    return Script(
        token_ids=ids,
        repeat=repeat if response.repeat is None else response.repeat,
        prompt_starts_with_ids=response.prompt_starts_with_ids,
        prompt_contains_ids=response.prompt_contains_ids,
        prompt_contains=response.prompt_contains,
    )


def _contains(ids: tuple[int, ...], part: tuple[int, ...]) -> bool:
    return any(ids[i : i + len(part)] == part for i in range(len(ids) - len(part) + 1))
