"""Requests through the real scheduler and a Runner over the oracle model, and what each of them must get."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxllm.config.engine import SchedulerConfig
from jaxllm.memory.manager import KVManager
from jaxllm.runner.runner import Runner
from jaxllm.scheduler.registry import create_policy
from jaxllm.scheduler.scheduler import Scheduler
from jaxllm.scheduler.stop import StopRules
from jaxllm.types.request import Request
from jaxllm.types.step import Logprobs, PromptLogprobs
from tests.runner.oracle_model import VOCAB, next_logits
from tests.sampling.reference import Processors, Row, filtered, log_softmax, shaped

TOLERANCE = 1e-4


@dataclass
class Answer:
    """All that the updates of one request held."""

    request: Request
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt: list[PromptLogprobs] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return self.request.output_ids


@dataclass
class Service:
    """Runs batches of requests; what is left in slots and pages of one is there when the next comes."""

    runner: Runner
    config: SchedulerConfig
    caching: bool = True
    in_flight: int = 1
    num_preemptions: int = 0
    batch_sizes: set[int] = field(default_factory=set)

    def run(self, requests: Sequence[Request]) -> dict[str, Answer]:
        memory = KVManager(self.runner.kv_plan, enable_prefix_caching=self.caching)
        stop = StopRules(frozenset(), self.config.max_model_len)
        scheduler = Scheduler(self.config, memory, create_policy("fcfs"), stop)
        answers = {r.request_id: Answer(r) for r in requests}
        for request in requests:
            scheduler.add(request)
        pending = []
        while scheduler.has_unfinished or pending:
            plan = scheduler.schedule(0.0)
            if plan is not None:
                self.batch_sizes.add(plan.rows.num_rows)
                pending.append((plan, self.runner.submit(plan)))
            assert pending, "the scheduler has requests and plans nothing"
            if plan is None or len(pending) > self.in_flight:
                oldest, ticket = pending.pop(0)
                self._take(scheduler.update(oldest, self.runner.collect(ticket)), answers)
        memory.check()
        assert memory.num_free_pages == memory.num_pages - 1
        self.num_preemptions += scheduler.num_preemptions
        return answers

    @staticmethod
    def _take(updates: Sequence, answers: dict[str, Answer]) -> None:
        for update in updates:
            answer = answers[update.request.request_id]
            if update.logprobs is not None:
                answer.logprobs.append(update.logprobs)
            if update.prompt_logprobs is not None:
                answer.prompt.append(update.prompt_logprobs)


def row_before(request: Request, num_output: int) -> Row:
    """What the reference sampler needs to choose output token `num_output` of `request`."""
    tokens = (*request.prompt_ids, *request.output_ids[:num_output])
    return Row(
        logits=next_logits(tokens),
        params=request.params,
        tokens=tokens,
        num_prompt_tokens=len(request.prompt_ids),
        seed=request.seed,
        bad_word_ids=request.bad_word_ids,
    )


def check_answer(answer: Answer, processors: Processors | None = None) -> None:
    """Every token of a finished request, its log probabilities and its prompt's against NumPy."""
    request, params = answer.request, answer.request.params
    for i, token in enumerate(answer.tokens):
        logits = filtered(shaped(row_before(request, i), processors), params)
        if params.is_greedy:
            assert logits[token] >= logits.max() - TOLERANCE, f"{request.request_id}: token {i} is {token}"
        else:
            assert logits[token] > -np.inf, f"{request.request_id}: token {i} is {token}, which is filtered out"
    if params.logprobs is None and params.logprob_token_ids is None:
        assert not answer.logprobs
    else:
        assert [t for piece in answer.logprobs for t in piece.token_ids] == answer.tokens
        for i, columns in enumerate(answer.logprobs):
            logits = row_before(request, i).logits
            check_columns(columns, 0, logits, params.logprobs or 0, params.logprob_token_ids)
    check_prompt(answer)


def check_prompt(answer: Answer) -> None:
    """Positions 1 to the last, each once and in order."""
    prompt, num_top = answer.request.prompt_ids, answer.request.params.prompt_logprobs
    if num_top is None:
        assert not answer.prompt
        return
    position = 1
    for piece in answer.prompt:
        assert piece.start == position
        for i, token in enumerate(piece.columns.token_ids):
            assert token == prompt[position]
            check_columns(piece.columns, i, next_logits(prompt[:position]), num_top)
            position += 1
    assert position == len(prompt)


def check_columns(
    columns: Logprobs, index: int, logits: np.ndarray, num_top: int, chosen: tuple[int, ...] | None = None
) -> None:
    """One position of `columns` against the log-softmax of `logits`."""
    expected, token = log_softmax(logits), columns.token_ids[index]
    assert abs(columns.values[index] - expected[token]) < TOLERANCE
    assert columns.ranks[index] == 1 + int((logits > logits[token]).sum())
    top_ids, top_values = columns.top_ids[index], columns.top_values[index]
    assert columns.is_ranked is (chosen is None)
    if chosen is not None:
        assert top_ids == list(chosen)
    else:
        assert len(top_ids) == (VOCAB if num_top < 0 else num_top)
        assert top_ids == np.argsort(-logits, kind="stable")[: len(top_ids)].tolist()
    assert np.allclose(top_values, expected[top_ids], atol=TOLERANCE)
