"""Pages copied for siblings: exactly the page, in place, and the siblings' tokens."""

from __future__ import annotations

import re
from dataclasses import replace

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxllm.config.engine import SchedulerConfig
from jaxllm.runner.batch_builder import COPY_CHUNK, pack_copies
from jaxllm.runner.executable_store import Program
from jaxllm.runner.runner import Runner
from jaxllm.runner.side_programs import copy_pages
from jaxllm.runner.step import ProgramSpec, int32
from jaxllm.types.request import Request
from jaxllm.types.sampling import SamplingParams
from tests.runner.drive import Piece, Planner, run
from tests.runner.oracle_model import VOCAB, greedy_continuation
from tests.runner.traffic import Service, check_answer

NUM_PAGES = 40
CONFIG = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=32, max_model_len=64)


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.permutations(range(1, NUM_PAGES)), st.integers(0, 19), st.integers(1, 19))
def test_exactly_the_pages_named_are_copied_in_every_layer(
    runner: Runner, pages: list[int], num_copies: int, num_sources: int
) -> None:
    shape = runner._state.kv[0].shape
    kv = np.random.default_rng(num_copies).standard_normal(shape).astype(np.float32)
    copies = [(pages[i % num_sources], pages[20 + i]) for i in range(num_copies)]
    expected = kv.copy()
    for source, target in copies:
        expected[:, target] = kv[:, source]
    device_kv = (jax.device_put(kv),)
    for chunk in pack_copies(copies):
        device_kv = runner._programs.side.copy_pages(device_kv, chunk)
    assert np.array_equal(np.asarray(device_kv[0]), expected)


def test_more_copies_than_a_call_makes_come_in_more_calls() -> None:
    copies = [(1 + i % 7, 100 + i) for i in range(2 * COPY_CHUNK + 3)]
    chunks = pack_copies(copies)
    assert len(chunks) == 3
    assert [tuple(c) for chunk in chunks for c in chunk.T.tolist() if c[1]] == copies
    assert not pack_copies([])


def test_a_copy_is_made_before_the_step_that_names_it(runner: Runner) -> None:
    """A sibling shares the full page of a prompt of six and copies the other, in which it then writes."""
    ids, planner = prompt(6), Planner()
    first = planner.plan([Piece("a", 0, 0, 6)], [planner.new("a", 0, ids)], {0: [3, 9, 4]})
    whole = greedy_continuation(ids, 4)
    tickets = [runner.submit(first)]
    sibling = planner.new("b", 5, ids, num_cached=5)
    before = runner.stats().num_host_to_device
    plan = planner.plan([Piece("a", 0, 6, 1), Piece("b", 5, 5, 1)], [sibling], {5: [3, 20, 21]})
    tickets.append(runner.submit(replace(plan, page_copies=(((9, 20),),))))
    assert runner.stats().num_host_to_device - before == 2
    outputs = [runner.collect(t).tokens for t in tickets]
    assert outputs == [{"a": (whole[0],)}, {"a": (whole[1],), "b": (whole[0],)}]
    for i in range(2):
        plan = planner.plan([Piece("a", 0, 7 + i, 1), Piece("b", 5, 6 + i, 1)])
        assert run(runner, plan) == {"a": (whole[2 + i],), "b": (whole[1 + i],)}


@pytest.mark.parametrize("caching", [True, False])
def test_siblings_of_many_prompts_get_their_solo_tokens(runner: Runner, caching: bool) -> None:
    rng = np.random.default_rng(1)
    requests = []
    for i in range(12):
        ids, temperature = tuple(prompt(int(rng.integers(1, 28)), i)), float(rng.choice([0.0, 0.9]))
        params = SamplingParams(
            temperature=temperature, max_tokens=12, ignore_eos=True, frequency_penalty=0.5 * (i % 2), logprobs=2
        )
        for j in range(int(rng.integers(1, 5))):
            fork_of = f"r{i}" if j else None
            name = f"r{i}/{j}" if j else f"r{i}"
            requests.append(Request(name, ids, params, 0.0, seed=100 * i + j, fork_of=fork_of))
    service = Service(runner, CONFIG, caching=caching)
    answers = service.run(requests)
    alone = Service(runner, CONFIG, caching=False, in_flight=0)
    for answer in answers.values():
        check_answer(answer)
        r = answer.request
        solo = alone.run([Request("solo", r.prompt_ids, r.params, 0.0, seed=r.seed)])["solo"]
        assert solo.tokens == answer.tokens


@pytest.mark.parametrize("dtype", ["float32", "uint16", "int8"])  # uint16 holds the bits of a 16-bit float on a CPU
def test_pages_are_copied_in_place_one_at_a_time(dtype: str) -> None:
    kv = (jax.ShapeDtypeStruct((3, 256, 2, 2, 16, 64), dtype), jax.ShapeDtypeStruct((2, 256, 2, 2, 16, 32), dtype))
    spec = ProgramSpec.of("copy_pages", copy_pages, (kv, int32(2, COPY_CHUNK)), (0,))
    compiled = spec.trace(jax.devices()[0]).lower().compile()
    sizes = [np.prod(a.shape) * a.dtype.itemsize for a in kv]
    assert compiled.memory_analysis().alias_size_in_bytes >= sum(sizes)
    assert Program.of(compiled).temporary_bytes < sum(sizes) / 256 + 4096
    for array in kv:
        shape = ",".join(map(str, array.shape))
        assert not re.findall(rf"= \w+\[{shape}\]\S* copy(?:-start)?\(.*", compiled.as_text())
