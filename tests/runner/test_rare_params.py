"""Everything that SamplingParams can ask of the device, through real plans, against NumPy one token at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.config.engine import SchedulerConfig
from jaxllm.runner.runner import Runner
from jaxllm.types.processors import LogitsProcessor
from jaxllm.types.request import Request
from jaxllm.types.sampling import SamplingParams
from tests.runner.drive import Piece, Planner, run
from tests.runner.oracle_model import VOCAB, greedy_continuation
from tests.runner.traffic import Service, check_answer

CONFIG = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=32, max_model_len=64)
PROCESSORS = (
    LogitsProcessor("shift_even", lambda logits, by: logits.at[:, ::2].add(by[:, None])),
    LogitsProcessor("flip", lambda logits, by: by[:, None] - logits),
)


def _shift_even(logits: np.ndarray, by: float) -> np.ndarray:
    logits = logits.copy()
    logits[::2] += by
    return logits


IN_NUMPY = {"shift_even": _shift_even, "flip": lambda logits, by: by - logits}


@pytest.fixture(scope="module")
def processing(start: Callable[..., Runner]) -> Iterator[Runner]:
    runner = start(processors=PROCESSORS)
    yield runner
    assert runner.compilations_after_ready == 0
    runner.close()


def draw_params(rng: np.random.Generator, **fixed: Any) -> SamplingParams:
    """A few fields each, any of them."""
    some_ids = tuple(rng.choice(VOCAB, 40, replace=False).tolist())
    fields: dict[str, Any] = {
        "presence_penalty": float(rng.choice([-1.5, 1.0])),
        "frequency_penalty": float(rng.choice([-0.5, 1.25])),
        "repetition_penalty": float(rng.choice([0.8, 1.5])),
        "min_p": 0.05,
        "top_k": int(rng.integers(1, 30)),
        "top_p": 0.8,
        "min_tokens": 3,
        "stop_token_ids": some_ids[:20],
        "logit_bias": {token: float(rng.choice([-100.0, -2.0, 1.5])) for token in some_ids[:10]},
        "allowed_token_ids": some_ids,
        "logprobs": int(rng.integers(0, 21)),
        "prompt_logprobs": int(rng.integers(0, 21)),
    }
    chosen = rng.choice(list(fields), int(rng.integers(0, 6)), replace=False).tolist()
    temperature = float(rng.choice([0.0, 0.7, 1.2]))
    return SamplingParams(
        **{"temperature": temperature, "max_tokens": None, **{name: fields[name] for name in chosen}, **fixed}
    )


def draw_request(rng: np.random.Generator, name: str, **fixed: Any) -> Request:
    prompt = tuple(rng.integers(0, VOCAB, rng.integers(1, 30)).tolist())
    max_tokens = int(rng.integers(4, 30))
    bad_words: tuple[tuple[int, ...], ...] = ()
    if rng.random() < 0.3:
        lengths = rng.integers(1, 4, 30)
        bad_words = tuple(tuple(rng.integers(0, VOCAB, n).tolist()) for n in lengths)
        fixed = {**fixed, "bad_words": ("any",)}
    params = draw_params(rng, max_tokens=max_tokens, ignore_eos=True, **fixed)
    seed = int(rng.integers(2**40))
    return Request(name, prompt, params, arrival_s=0.0, seed=seed, bad_word_ids=bad_words)


def again(request: Request) -> Request:
    return Request("solo", request.prompt_ids, request.params, 0.0, request.seed, bad_word_ids=request.bad_word_ids)


@pytest.mark.parametrize("in_flight", [0, 1])
def test_a_batch_of_all_kinds_follows_the_reference_and_solo_runs(runner: Runner, in_flight: int) -> None:
    """Short of pages, so that requests are preempted and placed again with their output; slots are used again."""
    rng = np.random.default_rng(in_flight)
    service = Service(runner, CONFIG, in_flight=in_flight)
    requests = [draw_request(rng, f"r{i}") for i in range(60)]
    answers = service.run(requests)
    assert service.num_preemptions > 3
    assert service.batch_sizes >= set(range(1, 9))
    for answer in answers.values():
        check_answer(answer)
    alone = Service(runner, CONFIG, caching=False, in_flight=0)
    for request in requests[:: 4 if in_flight else 3]:
        assert alone.run([again(request)])["solo"].tokens == request.output_ids, request.request_id


def test_a_preempted_request_still_knows_its_output_and_its_tables(runner: Runner) -> None:
    """Placed again in a slot with the rows of another, its output among the known tokens."""
    params = SamplingParams(temperature=0.0, frequency_penalty=1.5, logit_bias={5: 9.0}, bad_words=("any",))
    bad = ((9,), (5, 5, 5))
    ids, planner = [1, 2, 3, 4, 5, 6], Planner()

    def place(slot: int, tokens: list[int], pages: list[int], params: SamplingParams = params) -> int:
        new = planner.new("a", slot, tokens, params=params, num_prompt_tokens=6, bad_word_ids=bad)
        return run(runner, planner.plan([Piece("a", slot, 0, len(tokens))], [new], {slot: pages}))["a"][0]

    def decode(slot: int, start: int, count: int) -> list[int]:
        return [run(runner, planner.plan([Piece("a", slot, start + i, 1)]))["a"][0] for i in range(count)]

    whole = [place(0, ids, [1, 2, 3, 4, 5]), *decode(0, 6, 12)]
    assert whole[:2] == [5, 5], "the bias says so"
    assert whole[2] != 5, "and a bad word forbids the third"
    assert whole.count(5) < 7, "and each one costs it more"
    stale = SamplingParams(temperature=0.0, allowed_token_ids=(7,), repetition_penalty=2.0, bad_words=("any",))
    assert place(3, [7] * 20, [6, 7, 8, 9, 10, 11], stale) == 7
    resumed = [*whole[:7], place(3, [*ids, *whole[:7]], [12, 13, 14, 15, 16]), *decode(3, 13, 5)]
    assert resumed == whole


def test_a_plain_request_in_a_slot_with_stale_tables_is_not_touched(runner: Runner) -> None:
    ids, planner = [3, 1, 4], Planner()
    rare = SamplingParams(temperature=0.0, allowed_token_ids=(8,), logit_bias={8: 5.0}, presence_penalty=2.0)
    for slot in range(8):
        new = planner.new("a", slot, [8, 8], params=rare)
        assert run(runner, planner.plan([Piece("a", slot, 0, 2)], [new], {slot: [slot + 1]})) == {"a": (8,)}
    for slot in range(8):
        new = planner.new("b", slot, ids)
        tokens = run(runner, planner.plan([Piece("b", slot, 0, 3)], [new], {slot: [slot + 10]}))
        assert list(tokens["b"]) == greedy_continuation(ids, 1)


def test_only_steps_with_rare_requests_send_more(runner: Runner) -> None:
    service = Service(runner, CONFIG)

    def sent_beyond_steps(params: SamplingParams, **fields: Any) -> int:
        before = runner.stats()
        service.run([Request("a", (1, 2, 3), params, 0.0, **fields)])
        after = runner.stats()
        assert after.num_syncs - before.num_syncs == after.num_steps - before.num_steps
        return (after.num_host_to_device - before.num_host_to_device) - (after.num_steps - before.num_steps)

    assert sent_beyond_steps(SamplingParams(seed=3, top_k=4, min_p=0.1, min_tokens=2)) == 0
    assert sent_beyond_steps(SamplingParams(logprobs=3)) == 0
    assert sent_beyond_steps(SamplingParams(presence_penalty=1.0)) == 1  # the prompt, for the history
    assert sent_beyond_steps(SamplingParams(logit_bias={1: 1.0})) == 1  # a row of the tables
    assert sent_beyond_steps(SamplingParams(bad_words=("x",)), bad_word_ids=((1, 2),)) == 2  # both


def test_processors_of_the_callers_own_change_the_rows_that_name_them(processing: Runner) -> None:
    rng = np.random.default_rng(3)
    arguments = [{"shift_even": 3.0}, {"flip": 1.0}, {"flip": 0.0, "shift_even": -2.0}, None]
    requests = [draw_request(rng, f"r{i}", extra_args=arguments[i % 4]) for i in range(24)]
    for answer in Service(processing, CONFIG).run(requests).values():
        check_answer(answer, IN_NUMPY)


def test_programs_with_processors_are_neither_kept_nor_read(compile_cache: Any, start: Callable[..., Runner]) -> None:
    """A function has no key: another one of the same name must not find the first one's programs."""
    params = SamplingParams(temperature=0.0, extra_args={"only": 11.0}, max_tokens=1)
    start(max_num_seqs=1, max_num_batched_tokens=4).close()  # what holds no processor is kept from here on
    before = set(compile_cache.rglob("*.executable"))
    answers = []
    for sign in (1.0, -1.0):
        only = LogitsProcessor(
            "only", lambda logits, by, sign=sign: -sign * jnp.abs(jnp.arange(VOCAB, dtype=jnp.float32) - by[:, None])
        )
        runner = start(processors=(only,), max_num_seqs=1, max_num_batched_tokens=4)
        config = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=4, max_model_len=64)
        answers += Service(runner, config).run([Request("a", (1, 2), params, 0.0)])["a"].tokens
        runner.close()
    assert answers == [11, VOCAB - 1]
    assert set(compile_cache.rglob("*.executable")) == before
