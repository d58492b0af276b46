"""A recorded run's requests and answers, against what its engine told its callers."""

from __future__ import annotations

from collections import defaultdict

import msgspec
import pytest

from jaxllm.config.engine import CacheConfig
from jaxllm.engine.core import EngineCore
from jaxllm.engine.trace import Arrived, Line
from jaxllm.errors import ConfigError
from jaxllm.sim.executor import any_token
from jaxllm.sim.recorded import Recorded, read_recorded
from jaxllm.sim.replica import EngineSetup
from jaxllm.sim.simulator import simulate
from jaxllm.sim.workload_spec import make_workload, tokens_of
from tests.helpers.traced_run import traced_run
from tests.sim.workload_runs import Steps


@pytest.fixture
def told(monkeypatch):
    """Output ids by request, as the core tells them to the front end."""
    answers = defaultdict[str, tuple[int, ...]](tuple)
    step = EngineCore.step

    def heard(core):
        deltas = step(core)
        for delta in deltas.deltas if deltas is not None else ():
            answers[delta.request_id] += delta.token_ids
        return deltas

    monkeypatch.setattr(EngineCore, "step", heard)
    return answers


def lines(path):
    return [msgspec.json.decode(text, type=Line) for text in path.read_bytes().splitlines()]


@pytest.mark.parametrize("policy", ["fcfs", "shortest_first"])
@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_answers_are_what_the_engine_told(tmp_path, told, policy, async_scheduling, seed):
    path = tmp_path / "trace.jsonl"
    run = traced_run(path, policy=policy, async_scheduling=async_scheduling, seed=seed)
    recorded = read_recorded(path)
    answers = {request_id: ids for request_id, ids in told.items() if ids}
    found = {request_id: ids for request_id, (_, ids) in recorded.tokens.answers.items()}
    assert run.num_preemptions > 0
    assert found == answers
    arrivals = list(recorded.start())
    assert {arrival.request_id: arrival.num_output for arrival in arrivals} == {i: len(ids) for i, ids in found.items()}
    assert recorded.num_left_out == run.num_arrived - len(arrivals)


def test_requests_come_as_they_arrived_and_so_many_times_as_fast(tmp_path):
    path = tmp_path / "trace.jsonl"
    traced_run(path)
    arrived = {line.request.request_id: line.request for line in lines(path) if isinstance(line, Arrived)}
    slow, fast = (list(read_recorded(path, speed=speed).start()) for speed in (1.0, 4.0))
    begin = arrived[slow[0].request_id].arrival_s
    assert [a.at_s for a in slow] == sorted(a.at_s for a in slow)
    for arrival, sooner in zip(slow, fast, strict=True):
        request = arrived[arrival.request_id]
        assert arrival.at_s == pytest.approx(request.arrival_s - begin)
        assert sooner.at_s == pytest.approx(arrival.at_s / 4)
        assert (arrival.prompt_ids, arrival.priority, arrival.service, arrival.cache_salt) == (
            *(request.prompt_ids, request.priority, request.service, request.cache_salt),
        )
    assert list(read_recorded(path, limit=7).start()) == slow[:7]


def test_a_simulation_answers_with_the_recorded_tokens(tmp_path, told):
    path = tmp_path / "trace.jsonl"
    traced_run(path)
    recorded = dict(told)
    told.clear()
    workload = make_workload({"kind": "jaxllm_trace", "file": "trace.jsonl"}, 0, "test: workload", folder=tmp_path)
    assert isinstance(workload, Recorded)
    header = workload.header
    setup = EngineSetup(scheduler=header.scheduler, cache=CacheConfig(page_size=4, num_pages=64))
    result = simulate(setup, Steps(), workload, tokens=tokens_of(workload), keep_prompts=True)
    assert len(result.served) > 50
    for served in result.served:
        request_id = served.arrival.request_id
        if served.arrival.service.deadline_s is None:
            assert told[request_id] == recorded[request_id]


def test_other_workloads_are_answered_with_any_token():
    spec = {"kind": "at_once", "num_requests": 1, "prompt": 1, "output": 1}
    assert tokens_of(make_workload(spec, 0, "test: workload")) is any_token


def test_a_trace_that_was_cut_off_is_read_as_far_as_it_goes(tmp_path):
    path = tmp_path / "trace.jsonl"
    traced_run(path)
    whole = read_recorded(path)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    half = read_recorded(path)
    assert 0 < len(half.tokens.answers) < len(whole.tokens.answers)
    for request_id, (num_prompt, ids) in half.tokens.answers.items():
        assert whole.tokens.answers[request_id][0] == num_prompt
        assert whole.tokens.answers[request_id][1][: len(ids)] == ids


def test_a_wrong_trace_is_refused_by_its_line(tmp_path):
    path = tmp_path / "trace.jsonl"
    traced_run(path)
    texts = path.read_bytes().splitlines(keepends=True)
    collected = next(i for i, text in enumerate(texts) if b'"collected"' in text)
    arrived = next(i for i, text in enumerate(texts) if b'"arrived"' in text)
    for changed, said in (
        ([b"{}\n"], "line 1"),
        (texts[1:], "line 1"),
        ([*texts[:5], b"nonsense\n", *texts[5:]], "line 6"),
        ([*texts[: collected + 1], texts[collected], *texts[collected + 1 :]], f"line {collected + 2}: step="),
        ([*texts[: arrived + 1], texts[arrived], *texts[arrived + 1 :]], f"line {arrived + 2}: request_id="),
        ([*texts[:arrived], *texts[arrived + 1 :]], "did not arrive"),
        (texts[:1], "no request that was answered"),
    ):
        path.write_bytes(b"".join(changed))
        with pytest.raises(ConfigError) as error:
            read_recorded(path)
        assert said in str(error.value)
        assert str(path) in str(error.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_recorded(tmp_path / "none.jsonl")
