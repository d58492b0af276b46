"""Token ids for requests of which only lengths are known."""

from __future__ import annotations

import pickle

from jaxllm.sim.prompts import POOL, VOCABULARY, Prompts


def test_prompts_differ_from_their_first_tokens_on():
    prompts = Prompts(0)
    numbers = [*range(20_000), POOL - 1, POOL, POOL + 1, 5 * POOL]
    assert len({prompts.fresh(number, 5) for number in numbers}) == len(numbers)


def test_a_prompt_depends_on_seed_number_and_length_alone():
    prompts, again = Prompts(7), Prompts(7)
    wanted = {number: prompts.fresh(number, 50) for number in (0, 3, POOL + 3)}
    assert {number: again.fresh(number, 50) for number in reversed(wanted)} == wanted
    assert prompts.fresh(3, 20) == wanted[3][:20]
    assert Prompts(8).fresh(3, 50) != wanted[3]
    assert Prompts(-7).fresh(3, 50) != wanted[3]


def test_prompts_have_the_length_and_the_ids_they_should():
    prompts = Prompts(0)
    for number, length in ((0, 0), (1, 1), (2, POOL - 1), (3, POOL), (77_777, 3 * POOL + 5)):
        ids = prompts.fresh(number, length)
        assert len(ids) == length
        assert all(0 <= token < VOCABULARY for token in ids[:1000])


def test_what_is_shared_is_one_object_and_grows_from_its_beginning():
    prompts = Prompts(0)
    short = prompts.shared("system", 100)
    assert prompts.shared("system", 100) is short
    assert prompts.shared("system", 300)[:100] == short
    assert prompts.shared("system", 100) == short
    assert prompts.shared("other", 100) != short


def test_a_pickled_one_is_small_and_goes_on_as_before():
    prompts = Prompts(3)
    first = prompts.fresh(5, 30)
    text = pickle.dumps(prompts)
    assert len(text) < 10_000
    assert pickle.loads(text).fresh(5, 30) == first
