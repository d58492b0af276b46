"""Runner mechanics on hand-made plans, against the oracle's arithmetic."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.runner.runner import Runner
from jaxllm.types.step import SchedulerOutput
from tests.runner.drive import PAGE_SIZE, Piece, Planner, run
from tests.runner.oracle_model import VOCAB, greedy_continuation

NUM_PAGES = 40
LAST_PAGE = NUM_PAGES - 1


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def decode(runner: Runner, planner: Planner, request_id: str, slot: int, start: int, count: int) -> list[int]:
    """`count` decode steps from position `start`, each collected before the next."""
    return [run(runner, planner.plan([Piece(request_id, slot, start + i, 1)]))[request_id][0] for i in range(count)]


def test_a_chunked_prompt_and_its_decodes_follow_the_oracle(runner: Runner) -> None:
    ids, planner = prompt(13), Planner()
    first = planner.plan([Piece("a", 2, 0, 6, samples=False)], [planner.new("a", 2, ids)], {2: [9, 3, 30, 5, 7]})
    assert run(runner, first) == {}
    tokens = [run(runner, planner.plan([Piece("a", 2, 6, 7)]))["a"][0]]
    tokens += decode(runner, planner, "a", 2, 13, 6)
    assert tokens == greedy_continuation(ids, 7)


def test_steps_in_flight_read_the_tokens_that_the_host_has_not_seen(runner: Runner) -> None:
    ids, planner = prompt(5, 1), Planner()
    plans = [planner.plan([Piece("a", 0, 0, 5)], [planner.new("a", 0, ids)], {0: [4, 8, 12]})]
    plans += [planner.plan([Piece("a", 0, 5 + i, 1)]) for i in range(6)]
    tickets = [runner.submit(p) for p in plans]
    assert [runner.collect(t).tokens["a"][0] for t in tickets] == greedy_continuation(ids, 7)


def test_decodes_and_chunks_of_many_requests_share_a_step(runner: Runner) -> None:
    prompts = {name: prompt(length, length) for name, length in (("a", 7), ("b", 11), ("c", 1), ("d", 3))}
    planner, slots = Planner(), {"a": 3, "b": 1, "c": 0, "d": 2}
    pages = {3: [1, 2, 3], 1: [4, 5, 6, 7], 0: [8], 2: [9, 10]}
    got: dict[str, list[int]] = {name: [] for name in prompts}

    def step(names: str, lengths: dict[str, int], starts: dict[str, int], first: str = "") -> None:
        new = [planner.new(n, slots[n], prompts[n]) for n in first]
        pieces = [Piece(n, slots[n], starts[n], lengths[n]) for n in names]
        plan = planner.plan(pieces, new, {slots[n]: pages[slots[n]] for n in first})
        for name, tokens in run(runner, plan).items():
            got[name] += tokens

    step("ab", {"a": 7, "b": 11}, {"a": 0, "b": 0}, "ab")
    step("cadb", {"a": 1, "b": 1, "c": 1, "d": 3}, {"a": 7, "b": 11, "c": 0, "d": 0}, "cd")
    step("abcd", dict.fromkeys("abcd", 1), {"a": 8, "b": 12, "c": 1, "d": 3})
    assert got == {name: greedy_continuation(ids, len(got[name])) for name, ids in prompts.items()}
    assert {name: len(tokens) for name, tokens in got.items()} == {"a": 3, "b": 3, "c": 2, "d": 2}


def test_a_preempted_request_resumes_in_another_slot_with_other_pages(runner: Runner) -> None:
    ids, planner = prompt(6, 3), Planner()
    run(runner, planner.plan([Piece("a", 0, 0, 6)], [planner.new("a", 0, ids)], {0: [20, 21]}))
    decode(runner, planner, "a", 0, 6, 2)
    known = ids + greedy_continuation(ids, 3)
    other = prompt(8, 4)
    run(runner, planner.plan([Piece("b", 0, 0, 8)], [planner.new("b", 0, other)], {0: [21, 20]}))
    resumed = planner.plan([Piece("a", 3, 0, 9)], [planner.new("a", 3, known)], {3: [31, 22, 6]})
    tokens = [*run(runner, resumed)["a"], *decode(runner, planner, "a", 3, 9, 3)]
    assert tokens == greedy_continuation(ids, 7)[3:]


def test_a_prefix_hit_reads_pages_that_another_request_wrote(runner: Runner) -> None:
    shared, planner = prompt(8, 5), Planner()
    run(runner, planner.plan([Piece("a", 0, 0, 8)], [planner.new("a", 0, shared)], {0: [14, 15]}))
    longer = [*shared, *prompt(3, 6)]
    plan = planner.plan([Piece("b", 1, 8, 3)], [planner.new("b", 1, longer, num_cached=8)], {1: [14, 15, 16, 17]})
    tokens = [*run(runner, plan)["b"], *decode(runner, planner, "b", 1, 11, 2)]
    assert tokens == greedy_continuation(longer, 3)


def test_entries_of_a_longer_request_that_held_the_slot_are_not_seen(runner: Runner) -> None:
    planner = Planner()
    run(runner, planner.plan([Piece("a", 1, 0, 30)], [planner.new("a", 1, prompt(30, 8))], {1: list(range(1, 9))}))
    ids = prompt(2, 9)
    plan = planner.plan([Piece("b", 1, 0, 2)], [planner.new("b", 1, ids)], {1: [20]})
    assert list(run(runner, plan)["b"]) == greedy_continuation(ids, 1)


def test_more_page_table_changes_than_a_step_holds_are_sent_ahead(start: Callable[..., Runner]) -> None:
    runner = start(num_pages=1600, max_num_seqs=2, max_model_len=6000)
    planner, pages = Planner(), np.random.default_rng(0).permutation(np.arange(1, 1600))[:1400].tolist()
    ids, size = prompt(5600, 10), 32
    new, given = [planner.new("a", 1, ids)], {1: pages}
    sent = runner.stats().num_host_to_device
    for first in range(0, 96, size):
        run(runner, planner.plan([Piece("a", 1, first, size, samples=False)], new, given))
        new, given = [], {}
    assert runner.stats().num_host_to_device - sent == 3 + 2  # 1400 changes: 2 overflow chunks beside 3 steps
    table = np.asarray(runner._state.page_table)
    assert table[1, :1400].tolist() == pages
    assert not table[-1].any(), "the spare slot's pages are the null page"
    short = [planner.new("b", 0, ids[:96], num_cached=92)]
    plan = planner.plan([Piece("b", 0, 92, 4)], short, {0: pages[:24]})
    assert list(run(runner, plan)["b"]) == greedy_continuation(ids[:96], 1)
    assert runner.compilations_after_ready == 0
    runner.close()


def _owned(pages: list[int]) -> np.ndarray:
    return np.isin(np.arange(NUM_PAGES), [0, *pages])


def test_tpu_04_padding_touches_the_null_page_alone(runner: Runner) -> None:
    kv = runner._state.kv[0]
    marked = np.full(kv.shape, np.nan, np.float32)
    runner._state.kv = (jax.device_put(marked),)
    ids, planner = prompt(5, 11), Planner()
    plan = planner.plan([Piece("a", 0, 0, 5)], [planner.new("a", 0, ids)], {0: [6, 2]})
    tokens = [*run(runner, plan)["a"], *decode(runner, planner, "a", 0, 5, 2)]
    assert tokens == greedy_continuation(ids, 3), "no NaN of an unwritten page reaches a real row"
    after = np.asarray(runner._state.kv[0])
    untouched = ~_owned([6, 2])
    assert untouched[LAST_PAGE]
    assert np.array_equal(after[:, untouched], marked[:, untouched], equal_nan=True)
    written = after[-1, [6, 2], :, 0].reshape(-1)
    assert written[:7].tolist() == [float(t) for t in [*ids, *tokens[:2]]]
    assert np.isnan(written[7:]).all(), "a token writes its own position alone"
    runner._state.kv = (jnp.zeros(kv.shape, kv.dtype),)


def test_a_step_without_samples_still_waits_for_the_device_once(runner: Runner) -> None:
    planner, before = Planner(), runner.stats()
    plan = planner.plan([Piece("a", 0, 0, 4, samples=False)], [planner.new("a", 0, prompt(9))], {0: [1, 2, 3]})
    assert run(runner, plan) == {}
    assert runner.stats().num_syncs - before.num_syncs == 1


def test_collecting_out_of_order_is_refused(runner: Runner) -> None:
    planner = Planner()
    plan = planner.plan([Piece("a", 0, 0, 2)], [planner.new("a", 0, prompt(2))], {0: [1]})
    first = runner.submit(plan)
    second = runner.submit(planner.plan([Piece("a", 0, 2, 1)]))
    with pytest.raises(ValueError, match="not the oldest in flight"):
        runner.collect(second)
    runner.collect(first)
    runner.collect(second)


def test_a_plan_this_runner_cannot_compute_is_refused(runner: Runner) -> None:
    rows = Planner().plan([]).rows
    with pytest.raises(ValueError, match="num_steps=2"):
        runner.submit(SchedulerOutput(step_id=1, new=(), rows=rows, page_diffs=(), num_steps=2))


def test_bfloat16_pages_and_activations_give_the_same_tokens(start: Callable[..., Runner]) -> None:
    runner = start(dtype="bfloat16", max_num_seqs=2, max_num_batched_tokens=16)
    ids, planner = prompt(6, 12), Planner()
    plan = planner.plan([Piece("a", 0, 0, 6)], [planner.new("a", 0, ids)], {0: [5, 9, 1]})
    tokens = [*run(runner, plan)["a"], *decode(runner, planner, "a", 0, 6, 5)]
    assert tokens == greedy_continuation(ids, 6)
    assert min(b.num_requests for b in runner.buckets.decode) == 2
    runner.close()


def test_closing_twice_gives_the_pages_back(start: Callable[..., Runner]) -> None:
    runner = start()
    planner = Planner()
    runner.submit(planner.plan([Piece("a", 0, 0, PAGE_SIZE)], [planner.new("a", 0, prompt(4))], {0: [1]}))
    kv = runner._state.kv[0]
    runner.close()
    runner.close()
    assert kv.is_deleted()
