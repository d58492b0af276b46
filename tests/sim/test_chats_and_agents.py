"""Conversations: what each request carries, and when it comes."""

from __future__ import annotations

import itertools
import pickle
from collections import defaultdict

import pytest

from jaxllm.sim.sessions import Turn, within
from jaxllm.sim.workload_spec import make_workload
from tests.sim.workload_runs import Steps, arrivals, run

CHATS = {
    "kind": "chats",
    "rate": 2,
    "num_sessions": 25,
    "turns": {"kind": "uniform", "low": 1, "high": 5},
    "user": {"kind": "lognormal", "median": 25, "sigma": 0.5},
    "output": [4, 9],
    "think_s": {"kind": "exponential", "mean": 2},
    "system_tokens": 64,
}
AGENTS = {
    "kind": "agents",
    "rate": 1,
    "cv": 2,
    "num_sessions": 20,
    "system_tokens": 320,
    "task": 30,
    "calls": [0, 1, 4],
    "call": 6,
    "result": {"kind": "uniform", "low": 10, "high": 50},
    "answer": 20,
    "pause_s": 0.7,
}


def by_session(result):
    sessions = defaultdict(list)
    for served in result.served:
        sessions[served.arrival.session].append(served)
    return sessions.values()


@pytest.mark.parametrize("spec", [CHATS, AGENTS, {**CHATS, "rate": [[5, 1.0], [5, 4.0]], "burstiness": 0.5}])
def test_each_turn_carries_all_that_was_said_and_the_answers_length_in_between(spec):
    for turns in by_session(run(spec)):
        for before, after in itertools.pairwise(turns):
            said = before.arrival.num_prompt
            assert after.arrival.prompt_ids[:said] == before.arrival.prompt_ids
            assert after.arrival.num_prompt > said + before.num_output
            assert after.arrival.at_s >= before.end_s


def test_what_comes_between_two_questions_is_the_answer_itself():
    workload = make_workload({**CHATS, "turns": 2}, 0, "test: workload")
    first = next(iter(workload.start()))
    (second,) = workload.ended(first, 9.0, [7, 8, 9])
    assert second.prompt_ids[: first.num_prompt + 3] == (*first.prompt_ids, 7, 8, 9)
    assert second.at_s > 9.0
    assert workload.ended(second, 20.0, [1]) == ()


def test_all_conversations_begin_with_the_same_system_text_and_differ_after_it():
    firsts = [turns[0].arrival.prompt_ids for turns in by_session(run(CHATS))]
    assert len({ids[:64] for ids in firsts}) == 1
    assert len({ids[64:70] for ids in firsts}) == len(firsts)


def test_tenants_may_have_system_texts_of_their_own():
    spec = {**CHATS, "system_per_tenant": True, "classes": [{"tenant": "a"}, {"tenant": "b"}]}
    texts = defaultdict(set)
    for served in run(spec).served:
        texts[served.arrival.service.tenant].add(served.arrival.prompt_ids[:64])
    assert [len(found) for found in texts.values()] == [1, 1]
    assert texts["a"] != texts["b"]


def test_the_prefix_cache_finds_the_history_in_whole_pages():
    for turns in by_session(run(CHATS)):
        for before, after in itertools.pairwise(turns):
            computed = before.arrival.num_prompt + before.num_output - 1  # the last token was not computed
            assert after.num_hits >= computed // 16 * 16


def test_an_agent_sends_one_request_more_than_it_calls_tools_and_waits_for_each():
    for turns in by_session(run(AGENTS)):
        assert len(turns) in (1, 2, 5)
        assert [served.num_output for served in turns] == [6] * (len(turns) - 1) + [20]
        assert turns[0].arrival.num_prompt == 350
        for before, after in itertools.pairwise(turns):
            assert after.arrival.at_s == pytest.approx(before.end_s + 0.7)
            assert 10 <= after.arrival.num_prompt - before.arrival.num_prompt - 6 <= 50


def test_so_many_conversations_are_held_at_a_time():
    spec = {key: value for key, value in CHATS.items() if key != "rate"} | {"concurrency": 3}
    ends = [(turns[0].arrival.at_s, turns[-1].end_s) for turns in by_session(run(spec))]
    for at_s, _ in ends:
        assert sum(start <= at_s < end for start, end in ends) <= 3
    assert len(ends) == 25


@pytest.mark.parametrize("spec", [CHATS, AGENTS])
def test_the_same_conversations_are_held_whatever_the_engine_does(spec):
    slow, fast = arrivals(run(spec, cost=Steps(0.2, 0.001))), arrivals(run(spec, cost=Steps(0.001, 0.0)))
    assert {i: (a.prompt_ids, a.num_output) for i, a in slow.items()} == {
        i: (a.prompt_ids, a.num_output) for i, a in fast.items()
    }


def test_a_conversation_ends_where_a_request_is_refused():
    result = run({**CHATS, "turns": 5, "user": 900, "output": 1})  # the fifth turn exceeds 4096
    counts = [len(turns) for turns in by_session(result)]
    assert counts == [5] * 25
    assert all(turns[-1].error for turns in by_session(result))
    shorter = run({**CHATS, "turns": 5, "user": 900, "output": 1, "max_context": 4000})
    assert [len(turns) for turns in by_session(shorter)] == [4] * 25
    assert not any(served.error for served in shorter.served)


def test_turns_that_exceed_a_context_are_cut_off():
    turns = [Turn(10, 5), Turn(10, 5), Turn(10, 5)]
    assert [len(within(turns, 4, limit)) for limit in (None, 49, 48, 34, 33, 1)] == [3, 3, 2, 2, 1, 1]


def test_lengths_of_chats_may_follow_a_file(tmp_path):
    path = tmp_path / "chats.jsonl"
    tokens = [[(11, 3), (12, 4)], [(21, 5)]]
    lines = [
        '{"messages": ['
        + ", ".join(
            f'{{"role": "user", "tokens": {asked}}}, {{"role": "assistant", "tokens": {answered}}}'
            for asked, answered in pairs
        )
        + "]}"
        for pairs in tokens
    ]
    path.write_text("\n".join(lines))
    spec = {"kind": "chats", "rate": 2, "num_sessions": 20, "lengths": {"file": str(path)}}
    seen = set()
    for turns in by_session(run(spec)):
        said, lengths = 0, []
        for served in turns:
            lengths.append((served.arrival.num_prompt - said, served.num_output))
            said = served.arrival.num_prompt + served.num_output
        seen.add(tuple(lengths))
    assert seen == {tuple(pairs) for pairs in tokens}


def test_turns_do_not_change_when_answers_are_predicted():
    spec = {**CHATS, "prediction_sigma": 0.4}
    slow, fast = arrivals(run(spec, cost=Steps(0.2, 0.001))), arrivals(run(spec, cost=Steps(0.001, 0.0)))
    assert {i: a.service for i, a in slow.items()} == {i: a.service for i, a in fast.items()}
    assert {i: a.num_output for i, a in slow.items()} == {i: a.num_output for i, a in arrivals(run(CHATS)).items()}


def followed(workload, coming, turns):
    """All that comes, each request answered after a second."""
    found = []
    turns = [*turns, *coming]
    for arrival in turns:
        found.append(arrival)
        turns += workload.ended(arrival, arrival.at_s + 1, [1, 2])
    return found


@pytest.mark.parametrize("spec", [CHATS, AGENTS, {**AGENTS, "system_per_tenant": True, "prediction_sigma": 0.2}])
def test_conversations_that_are_pickled_and_started_again_go_on_where_they_were(spec):
    workload = make_workload(spec, 1, "test: workload")
    coming = iter(workload.start())
    first = [next(coming) for _ in range(8)]
    following = [next_turn for turn in first[:5] for next_turn in workload.ended(turn, 5.0, [1, 2])]
    again = pickle.loads(pickle.dumps(workload))
    same, other = itertools.tee(following)
    expected = followed(workload, coming, [*first[5:], *same])
    assert followed(again, itertools.islice(again.start(), 8, None), [*first[5:], *other]) == expected
    assert len(expected) > 30
