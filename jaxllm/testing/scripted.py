"""An executor that says what a script says: no model, no jax, any fault on demand.

`jaxllm serve --executor scripted:FILE.json` serves it. The file is one JSON object:

    {
      "responses": [
        {"prompt_contains": "capital of France", "text": " Paris."},
        {"prompt_starts_with_ids": [1, 2], "token_ids": [3, 4, 5]},
        {"prompt_contains_ids": [7, 8], "token_ids": [9], "repeat": true},
        {"prompt_contains": "a colour", "choices": ["red", "green", [98, 108]]},
        {"text": "the first request that no condition claims gets this"}
      ],
      "default": {"text": "Hello"},
      "step_s": 0.01,
      "faults": [{"step": 3, "kind": "raise", "where": "collect"}],
      "max_model_len": 2048,
      "repeat": false
    }

Every key may be left out. A response has one of "token_ids", "text" (tokenised without special
tokens) and "choices" (of either kind), which answers the siblings of a request with n > 1: the first
choice its first sibling, and so on, starting over when they are used up. The other two answer all
siblings alike. Which sibling a request is tells the end of its id, as the front end makes it ("…#4"
the first, "…#4/1" the second); siblings count as one request in what follows.

The first response whose conditions all hold answers a request. Responses without a
condition answer one request each, in order of arrival, among those no condition claimed; when
they are used up, "default" answers (without one: the end-of-sequence token at once). After its
last token a response emits the end-of-sequence id for ever, or starts again with "repeat".

Log probabilities are answered as params ask, by the rule in `jaxllm.testing.logprobs`. What a sibling
takes over of the first one's pages needs no care: tokens follow from positions alone.

"step_s" is the seconds a step takes. A fault happens in the "step"-th step (1 is the first):
"kind" is "raise" (an exception), "freeze" (the call never returns) or "die" (SystemExit, which
ends the thread); "where" is "collect" (the default) or "submit". "max_model_len" is what the
engine serves with.
"""

from __future__ import annotations

import math
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from jaxllm.engine.executor import Ticket
from jaxllm.errors import ConfigError
from jaxllm.testing.faults import Fault, FaultInjector, FaultPlace
from jaxllm.testing.logprobs import BYTE_VOCABULARY, scripted_columns
from jaxllm.types.step import NewRequest, PromptLogprobs, SchedulerOutput, StepOutput

Encode = Callable[[str], Sequence[int]]
Decode = Callable[[Sequence[int]], str]

_SIBLING = re.compile(r"(?P<first>#\d+)(/(?P<sibling>\d+))?$")  # the end of the ids that the front end makes
_MAX_REMEMBERED = 10_000
_MAX_ID = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Script:
    """What to answer, and to which prompts (no condition: see the module's text)."""

    token_ids: tuple[int, ...] = ()
    choices: tuple[tuple[int, ...], ...] = ()  # one a sibling, in place of token_ids
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

    def token(self, index: int, eos_id: int, sibling: int = 0) -> int:
        """The output token at `index` of the sibling of that number, both counted from 0."""
        ids = self.choices[sibling % len(self.choices)] if self.choices else self.token_ids
        if self.repeat and ids:
            return ids[index % len(ids)]
        return ids[index] if index < len(ids) else eos_id


@dataclass(slots=True)
class _Row:
    """A request on the stand-in device."""

    new: NewRequest
    script: Script
    sibling: int
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
    by_first: OrderedDict[str, Script] = field(default_factory=OrderedDict[str, Script])

    def script_for(self, new: NewRequest) -> tuple[Script, int]:
        """The same script each time a request or a sibling enters a slot, with the sibling's number.

        Nobody says when the last sibling has come, so the latest requests are remembered.
        """
        first, sibling = _family(new.request_id)
        chosen = self.by_first.pop(first, None) or self._choose(new.token_ids[: new.num_prompt_tokens])
        self.by_first[first] = chosen
        if len(self.by_first) > _MAX_REMEMBERED:
            self.by_first.popitem(last=False)
        return chosen, sibling

    def forget(self, request_id: str) -> None:
        """An id without siblings may come again at once, for another request."""
        if _SIBLING.search(request_id) is None:
            self.by_first.pop(request_id, None)

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
        vocab_size: int = BYTE_VOCABULARY,
    ) -> None:
        """`decode` is needed only for scripts with `prompt_contains`, `vocab_size` for log probabilities."""
        self.max_model_len = max_model_len
        self._eos_id = eos_id
        self._vocab_size = vocab_size
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
        cls,
        path: str | Path,
        *,
        encode: Encode,
        eos_id: int,
        decode: Decode | None = None,
        vocab_size: int = BYTE_VOCABULARY,
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
            vocab_size=vocab_size,
        )

    def submit(self, plan: SchedulerOutput) -> Ticket:
        self._num_submitted += 1
        self._injector.reach(self._num_submitted, FaultPlace.SUBMIT)
        for request_id in plan.finished:
            self._rows.pop(request_id, None)
            self._choice.forget(request_id)
        for new in plan.new:
            self._rows[new.request_id] = _Row(new, *self._choice.script_for(new), new.num_cached)
        output = self._run(plan)
        self._busy_until_s = max(self._busy_until_s, time.monotonic()) + self._step_s
        step = _Step(self._num_submitted, output, self._busy_until_s)
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

    def _run(self, plan: SchedulerOutput) -> StepOutput:
        rows = plan.rows
        output = StepOutput(plan.step_id, {}, device_s=self._step_s)
        columns = (rows.starts.tolist(), rows.num_tokens.tolist(), rows.samples.tolist())
        for request_id, start, num_tokens, samples in zip(rows.request_ids, *columns, strict=True):
            row = self._rows[request_id]
            if start != row.next_start:
                raise RuntimeError(
                    f"step {plan.step_id} starts {request_id!r} at position {start}, not at {row.next_start}"
                )
            row.next_start = start + num_tokens
            if samples:
                self._sample(row, output)
            if row.new.params.prompt_logprobs is not None:
                self._score(row, start, output)
        return output

    def _sample(self, row: _Row, output: StepOutput) -> None:
        params = row.new.params
        token = row.script.token(row.next_start - row.new.num_prompt_tokens, self._eos_id, row.sibling)
        output.tokens[row.new.request_id] = (token,)
        if params.logprobs is not None or params.logprob_token_ids is not None:
            columns = scripted_columns((token,), params.logprobs or 0, params.logprob_token_ids, self._vocab_size)
            output.logprobs[row.new.request_id] = columns

    def _score(self, row: _Row, start: int, output: StepOutput) -> None:
        new = row.new
        targets = new.token_ids[start + 1 : min(row.next_start + 1, new.num_prompt_tokens)]
        if targets:
            columns = scripted_columns(targets, new.params.prompt_logprobs or 0, vocab_size=self._vocab_size)
            output.prompt_logprobs[new.request_id] = PromptLogprobs(start + 1, columns)


class _ResponseEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    token_ids: tuple[int, ...] | None = None
    text: str | None = None
    choices: tuple[str | tuple[int, ...], ...] | None = None
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
    wrong = _what_is_wrong(script_file)
    if wrong is not None:
        raise ConfigError(f"script file {path}: {wrong}")
    return script_file


def _what_is_wrong(script_file: _ScriptFile) -> str | None:
    """The first value that is out of range, with what would be accepted."""
    if not (math.isfinite(script_file.step_s) and script_file.step_s >= 0):
        return f"step_s={script_file.step_s}; accepted: a finite number of seconds, at least 0"
    if script_file.max_model_len < 2:
        return f"max_model_len={script_file.max_model_len}; accepted: at least 2"
    for number, fault in enumerate(script_file.faults):
        if fault.step < 1:
            return f"faults[{number}].step={fault.step}; accepted: at least 1, the first step"
    named = [(f"responses[{number}]", response) for number, response in enumerate(script_file.responses)]
    if script_file.default is not None:
        named.append(("default", script_file.default))
    return next(filter(None, (_wrong_response(name, response) for name, response in named)), None)


def _wrong_response(name: str, response: _ResponseEntry) -> str | None:
    answers = [key for key in ("token_ids", "text", "choices") if getattr(response, key) is not None]
    if len(answers) > 1:
        return f"{name} has both {' and '.join(answers)}; accepted: one"
    if response.choices == ():
        return f"{name}.choices=[]; accepted: at least one text or list of token ids"
    ids = {key: getattr(response, key) for key in ("token_ids", "prompt_starts_with_ids", "prompt_contains_ids")}
    listed = {f"choices[{i}]": c for i, c in enumerate(response.choices or ()) if not isinstance(c, str)}
    for key, values in {**ids, **listed}.items():
        for value in values or ():
            if not 0 <= value <= _MAX_ID:
                return f"{name}.{key} holds {value}; accepted: token ids, 0 to {_MAX_ID}"
    return None


def _keys() -> tuple[str, ...]:
    return _ScriptFile.__struct_fields__ + _ResponseEntry.__struct_fields__ + Fault.__struct_fields__


def _script(response: _ResponseEntry, repeat: bool, encode: Encode) -> Script:
    ids = tuple(encode(response.text)) if response.text is not None else response.token_ids or ()
    return Script(
        token_ids=ids,
        choices=tuple(tuple(encode(c)) if isinstance(c, str) else c for c in response.choices or ()),
        repeat=repeat if response.repeat is None else response.repeat,
        prompt_starts_with_ids=response.prompt_starts_with_ids,
        prompt_contains_ids=response.prompt_contains_ids,
        prompt_contains=response.prompt_contains,
    )


def _family(request_id: str) -> tuple[str, int]:
    """The id of the first sibling, and the number of this one."""
    found = _SIBLING.search(request_id)
    if found is None:
        return request_id, 0
    return request_id[: found.end("first")], int(found["sibling"] or 0)


def _contains(ids: tuple[int, ...], part: tuple[int, ...]) -> bool:
    return any(ids[i : i + len(part)] == part for i in range(len(ids) - len(part) + 1))
