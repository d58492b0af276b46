"""Hand-made plans, and a Runner over the oracle model to give them to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import jax
import numpy as np

from jaxllm.config.engine import CacheConfig, LogprobsConfig, SchedulerConfig
from jaxllm.runner.kv_buffers import HeadShape
from jaxllm.runner.runner import Runner
from jaxllm.runner.start import StartOptions, start_split_model
from jaxllm.types.processors import LogitsProcessor
from jaxllm.types.sampling import SamplingParams
from jaxllm.types.step import NewRequest, PageTableDiff, ScheduledRows, SchedulerOutput
from tests.runner.oracle_model import NUM_BYTES, VOCAB, OracleModel

PAGE_SIZE = 4
GREEDY = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)


def start_oracle(
    *,
    num_pages: int | None = 40,
    memory_bytes: int | None = None,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 32,
    max_model_len: int = 64,
    page_size: int = PAGE_SIZE,
    dtype: str = "float32",
    load: Callable[[], dict[str, jax.Array]] | None = None,
    logprobs: LogprobsConfig = LogprobsConfig(),  # noqa: B008 frozen
    processors: Sequence[LogitsProcessor] = (),
    options: StartOptions | None = None,
) -> Runner:
    model = OracleModel(dtype)
    return start_split_model(
        model,  # type: ignore[arg-type]
        load or model.weights,
        head=HeadShape(NUM_BYTES, VOCAB, dtype),
        cache=CacheConfig(page_size=page_size, num_pages=num_pages, memory_bytes=memory_bytes, dtype=dtype),
        scheduler=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
        ),
        min_rows=1 if dtype == "float32" else 2,
        logprobs=logprobs,
        processors=processors,
        options=options,
    )


@dataclass(frozen=True)
class Piece:
    """Part of a step: `num_tokens` tokens of a request from position `start`."""

    request_id: str
    slot: int
    start: int
    num_tokens: int
    samples: bool = True


@dataclass
class Planner:
    """Makes one-group plans with ascending step ids, and remembers which pages a slot was given."""

    step_id: int = 0
    _given: dict[int, list[int]] = field(default_factory=dict)

    def new(
        self,
        request_id: str,
        slot: int,
        token_ids: Sequence[int],
        *,
        num_cached: int = 0,
        params: SamplingParams = GREEDY,
        num_prompt_tokens: int | None = None,
        bad_word_ids: tuple[tuple[int, ...], ...] = (),
    ) -> NewRequest:
        """`num_prompt_tokens` None: all of `token_ids`."""
        self._given.pop(slot, None)
        num_prompt = len(token_ids) if num_prompt_tokens is None else num_prompt_tokens
        return NewRequest(
            request_id, slot, tuple(token_ids), num_prompt, params, 7, num_cached, bad_word_ids=bad_word_ids
        )

    def plan(
        self, pieces: Sequence[Piece], new: Sequence[NewRequest] = (), pages: dict[int, Sequence[int]] | None = None
    ) -> SchedulerOutput:
        """`pages`: more pages of a slot, after the ones it was given before."""
        entries: list[tuple[int, int, int]] = []
        for slot, ids in (pages or {}).items():
            given = self._given.setdefault(slot, [])
            entries += [(slot, len(given) + i, page) for i, page in enumerate(ids)]
            given.extend(ids)
        columns = np.asarray(entries, np.int32).reshape(-1, 3).T
        ordered = sorted(pieces, key=lambda p: p.num_tokens != 1)
        rows = ScheduledRows(
            request_ids=tuple(p.request_id for p in ordered),
            slots=np.asarray([p.slot for p in ordered], np.int32),
            starts=np.asarray([p.start for p in ordered], np.int32),
            num_tokens=np.asarray([p.num_tokens for p in ordered], np.int32),
            samples=np.asarray([p.samples for p in ordered], np.bool_),
            num_decode=sum(p.num_tokens == 1 for p in ordered),
        )
        self.step_id += 1
        return SchedulerOutput(self.step_id, tuple(new), rows, (PageTableDiff(*columns),))


def run(runner: Runner, plan: SchedulerOutput) -> dict[str, tuple[int, ...]]:
    return runner.collect(runner.submit(plan)).tokens
