"""What a core decided, step by step, written down so that it can be decided again.

A trace is a file of JSON lines, in the order in which the core saw what they tell. The first is the
`Header`; then come `Arrived`, `Aborted`, `CacheReset`, `Planned` and `Collected`, and at last `Ended`,
which is missing if the process was killed. `jaxllm.engine.replay` reads it.
"""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path
from typing import Protocol

import msgspec

import jaxllm
from jaxllm.config.engine import CacheConfig, SchedulerConfig
from jaxllm.engine.messages import AbortRequests, AddRequest
from jaxllm.memory.plan import KVCachePlan
from jaxllm.types.step import Int32Array, SchedulerOutput, StepOutput

FORMAT = 1


class TraceRecorder(Protocol):
    """Hears all that goes into a core's decisions, and what they were, in the order in which it happens.

    The core's thread calls it: `arrived`, `aborted` and `cache_reset` before the scheduler or the KV
    manager is told, `planned` after each call of `schedule`, `collected` before `update`. It keeps the
    objects and never changes them; it does not raise, and it does not wait for a disk.
    """

    def arrived(self, message: AddRequest) -> None:
        """Refused ones too: whether it is refused is a decision."""
        ...

    def aborted(self, message: AbortRequests) -> None: ...

    def cache_reset(self) -> None:
        """The prefix cache is about to be forgotten, on somebody's request."""
        ...

    def planned(self, plan: SchedulerOutput | None, now_s: float) -> None:
        """`now_s`: what `schedule` was given. None: there was nothing to plan."""
        ...

    def collected(self, output: StepOutput) -> None: ...

    def close(self) -> None:
        """Write what is left. Safe to call twice; what comes after it is dropped."""
        ...


class Header(msgspec.Struct, frozen=True, tag="header"):
    """All that a core was made of, but for the device."""

    scheduler: SchedulerConfig
    cache: CacheConfig
    kv_plan: KVCachePlan
    eos_ids: tuple[int, ...]
    format: int = FORMAT
    versions: dict[str, str] = msgspec.field(
        default_factory=lambda: {"jaxllm": jaxllm.__version__, "python": platform.python_version()}
    )


class Arrived(msgspec.Struct, frozen=True, tag="arrived"):
    step: int  # the next one to be planned
    request: AddRequest


class Aborted(msgspec.Struct, frozen=True, tag="aborted"):
    step: int
    request_ids: tuple[str, ...]


class CacheReset(msgspec.Struct, frozen=True, tag="cache_reset"):
    step: int


class NewDecision(msgspec.Struct, frozen=True):
    """A request that enters a slot. Its tokens follow from what arrived and what was collected."""

    request_id: str
    slot: int
    num_tokens: int
    num_prompt_tokens: int
    num_cached: int
    seed: int
    token_hash: str


class Decision(msgspec.Struct, frozen=True, omit_defaults=True):
    """A plan in plain numbers; see `SchedulerOutput` and `ScheduledRows` for what they mean."""

    step: int
    request_ids: tuple[str, ...]
    slots: list[int]
    starts: list[int]
    num_tokens: list[int]
    samples: list[bool]
    num_decode: int
    new: tuple[NewDecision, ...] = ()
    pages: tuple[tuple[list[int], list[int], list[int]], ...] = ()  # by KV group: slots, indices, page ids
    page_copies: tuple[tuple[tuple[int, int], ...], ...] = ()
    preempted: tuple[str, ...] = ()
    finished: tuple[str, ...] = ()
    draft_ids: tuple[tuple[int, ...], ...] = ()
    adapter_slots: list[int] = []
    encoder_items: tuple[tuple[str, int], ...] = ()
    num_steps: int = 1

    @staticmethod
    def of(plan: SchedulerOutput) -> Decision:
        rows = plan.rows
        return Decision(
            step=plan.step_id,
            request_ids=rows.request_ids,
            slots=_plain(rows.slots),
            starts=_plain(rows.starts),
            num_tokens=_plain(rows.num_tokens),
            samples=rows.samples.tolist(),
            num_decode=rows.num_decode,
            new=tuple(
                NewDecision(
                    *(new.request_id, new.slot, len(new.token_ids), new.num_prompt_tokens, new.num_cached, new.seed),
                    token_hash=_hash(new.token_ids),
                )
                for new in plan.new
            ),
            pages=tuple((_plain(diff.slots), _plain(diff.indices), _plain(diff.pages)) for diff in plan.page_diffs),
            page_copies=plan.page_copies,
            preempted=plan.preempted,
            finished=plan.finished,
            draft_ids=plan.draft_ids,
            adapter_slots=_plain(plan.adapter_slots),
            encoder_items=plan.encoder_items,
            num_steps=plan.num_steps,
        )

    @property
    def hash(self) -> str:
        """The same for plans that decide the same, on every machine."""
        return _hash(self)


class Planned(msgspec.Struct, frozen=True, tag="planned", omit_defaults=True):
    now_s: float
    hash: str | None = None  # of the decision; None: there was nothing to plan
    decision: Decision | None = None


class Collected(msgspec.Struct, frozen=True, tag="collected", omit_defaults=True):
    """What a step answered. Of log probabilities only for whom, and at how many positions: nothing depends on them."""

    step: int
    tokens: dict[str, tuple[int, ...]]
    num_accepted: dict[str, int] = {}
    num_logprobs: dict[str, int] = {}
    prompt_logprobs: dict[str, tuple[int, int]] = {}  # first position, number of them
    device_s: float = 0.0

    @staticmethod
    def of(output: StepOutput) -> Collected:
        return Collected(
            output.step_id,
            output.tokens,
            output.num_accepted,
            {request_id: len(columns.token_ids) for request_id, columns in output.logprobs.items()},
            {i: (scored.start, len(scored.columns.token_ids)) for i, scored in output.prompt_logprobs.items()},
            output.device_s,
        )


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    reason: str


Line = Header | Arrived | Aborted | CacheReset | Planned | Collected | Ended


def trace_path(path: str | Path, core: int) -> Path:
    """Where the core of that number writes, of an engine that is told `path`: t.jsonl, t.1.jsonl, t.2.jsonl ..."""
    found = Path(path).expanduser()
    return found if core == 0 else found.with_suffix(f".{core}{found.suffix}")


def _plain(column: Int32Array) -> list[int]:
    return column.tolist()


def _hash(value: object) -> str:
    return hashlib.blake2b(msgspec.json.encode(value), digest_size=16).hexdigest()
