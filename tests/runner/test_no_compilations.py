"""Nothing compiles after ready, whatever requests ask and whenever they ask it first."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from jaxllm.config.engine import SchedulerConfig
from jaxllm.runner.runner import Runner
from jaxllm.types.processors import LogitsProcessor
from jaxllm.types.request import Request
from jaxllm.types.sampling import SamplingParams
from tests.runner.test_rare_params import draw_request
from tests.runner.traffic import Service, check_answer

FIRST_USES = (
    {"seed": 5},
    {"presence_penalty": 1.0},
    {"frequency_penalty": 1.0},
    {"repetition_penalty": 1.3},
    {"min_p": 0.1},
    {"top_k": 3},
    {"top_p": 0.7},
    {"min_tokens": 2, "stop_token_ids": (4,)},
    {"logit_bias": {3: 2.0}},
    {"allowed_token_ids": (3, 5, 8)},
    {"bad_words": ("any",)},
    {"logprobs": 4},
    {"logprob_token_ids": (5, 3)},
    {"prompt_logprobs": 2},
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 0},
    {"extra_args": {"halve": 1.0}},
)


@pytest.mark.parametrize("budget", [317, pytest.param(16_640, marks=pytest.mark.slow)])
def test_tpu_01_no_batch_size_and_no_first_use_of_a_field_compiles(start: Callable[..., Runner], budget: int) -> None:
    halve = LogitsProcessor("halve", lambda logits, by: logits * 0.5 * by[:, None])
    runner = start(max_num_batched_tokens=budget, num_pages=80, processors=(halve,))
    assert all(b.num_tokens <= budget and b.num_requests <= 8 for b in runner.buckets.forward)
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=budget, max_model_len=64)
    service = Service(runner, config)
    for fields in FIRST_USES:
        request = Request("a", (1, 2, 3), SamplingParams(**{"max_tokens": 3, **fields}), 0.0, bad_word_ids=((1, 2),))
        service.run([request])
        assert runner.compilations_after_ready == 0, fields
    rng = np.random.default_rng(budget)
    for batch in range(20):
        requests = [draw_request(rng, f"r{i}") for i in range(1 + batch % 10)]
        for answer in service.run(requests).values():  # its first token too: by arithmetic, no padding near
            check_answer(answer, {"halve": lambda logits, by: logits * 0.5 * by})
    assert service.batch_sizes >= set(range(1, 9))
    assert runner.compilations_after_ready == 0
    assert runner.stats().num_programs == len(runner.stats().temporary_bytes)
    runner.close()
