"""What passes through the door between scheduler and executor, both ways: plain data only.

The same objects serve the device, the simulator, recorded traces and a broadcast to other hosts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from jaxllm.types.sampling import SamplingParams

Int32Array = npt.NDArray[np.int32]
BoolArray = npt.NDArray[np.bool_]


def _empty_i32() -> Int32Array:
    return np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class NewRequest:
    """Full data of a request that enters (or re-enters, after preemption) a slot in this step."""

    request_id: str
    slot: int
    token_ids: tuple[int, ...]  # every token the host knows: prompt, and output after preemption
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    num_cached: int  # tokens already in pages (prefix cache, or a sibling's prompt)
    adapter_id: str | None = None
    bad_word_ids: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class ScheduledRows:
    """The requests of one step as columns, R rows, those with one token (decode) first.

    A request that samples computes its last token in this step. Token ids are not here: the
    executor has them from `NewRequest`; a position past those is the slot's own last sampled
    token, which never has to leave the device.
    """

    request_ids: tuple[str, ...]
    slots: Int32Array  # [R] device row of the request
    starts: Int32Array  # [R] position of its first token in this step
    num_tokens: Int32Array  # [R] tokens of this step
    samples: BoolArray  # [R] whether a token is sampled after its last row
    num_decode: int  # the first rows are decodes: one token, already past the prompt

    @property
    def num_rows(self) -> int:
        return len(self.request_ids)

    @property
    def total_tokens(self) -> int:
        return int(self.num_tokens.sum())


@dataclass(frozen=True, slots=True, eq=False)
class PageTableDiff:
    """Entries of the device page tables to overwrite before the step: table[slot, index] = page."""

    slots: Int32Array = field(default_factory=_empty_i32)
    indices: Int32Array = field(default_factory=_empty_i32)
    pages: Int32Array = field(default_factory=_empty_i32)

    def __len__(self) -> int:
        return len(self.slots)


@dataclass(frozen=True, slots=True, eq=False)
class SchedulerOutput:
    """One step, decided: who runs, how many tokens each, which pages are theirs."""

    step_id: int
    new: tuple[NewRequest, ...]
    rows: ScheduledRows  # all requests of the step, the new ones too
    page_diffs: tuple[PageTableDiff, ...]  # one per KV group
    preempted: tuple[str, ...] = ()
    finished: tuple[str, ...] = ()  # ended since the last plan; their slots may be reused by now
    draft_ids: tuple[tuple[int, ...], ...] = ()  # by row, the last of its tokens; empty where no row has any
    adapter_slots: Int32Array = field(default_factory=_empty_i32)
    page_copies: tuple[tuple[tuple[int, int], ...], ...] = ()  # by KV group: (from page, to page), before the step
    encoder_items: tuple[tuple[str, int], ...] = ()  # (request id, media index)
    num_steps: int = 1

    @property
    def total_tokens(self) -> int:
        return self.rows.total_tokens


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log probabilities at n positions of one request, in plain numbers; see `logprobs_mode` for their kind.

    The K entries of a position are the most likely tokens, most likely first, or (`is_ranked` false)
    the tokens that `logprob_token_ids` asked for, in its order.
    """

    token_ids: list[int]  # [n] the token at each position
    values: list[float]  # [n] its natural logarithm
    ranks: list[int]  # [n] 1 = no token is more likely
    top_ids: list[list[int]]  # [n][K]
    top_values: list[list[float]]  # [n][K]
    is_ranked: bool = True


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """A piece of a prompt's log probabilities: those of the tokens from position `start` (at least 1) on."""

    start: int
    columns: Logprobs


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a collected step yields. Only rows with `samples` appear in `tokens`: one token each, or, of a row
    with drafts, those that were accepted and one token after them.

    `logprobs` holds the requests whose params ask for them, with as many positions as `tokens`;
    `prompt_logprobs` those whose params ask and that computed prompt tokens in this step.
    """

    step_id: int
    tokens: dict[str, tuple[int, ...]]
    num_accepted: dict[str, int] = field(default_factory=dict[str, int])  # drafts kept, per request
    logprobs: dict[str, Logprobs] = field(default_factory=dict[str, Logprobs])
    prompt_logprobs: dict[str, PromptLogprobs] = field(default_factory=dict[str, PromptLogprobs])
    device_s: float = 0.0  # this and what follows: see `StepProfile`
    sample_s: float = 0.0
    copy_back_s: float = 0.0
    idle_s: float = 0.0
