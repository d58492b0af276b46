"""The synchronous engine from prompts to results."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from jaxllm.engine.engine import Engine, Terms
from jaxllm.engine.inputs import TokensPrompt
from jaxllm.errors import CapacityError, EngineDead, RequestError
from jaxllm.testing.faults import Fault, FaultKind
from jaxllm.types.outputs import RequestOutput
from jaxllm.types.sampling import OutputKind, SamplingParams
from jaxllm.types.service import ServiceParams
from tests.helpers.scripted_engine import EOS, Settings, make_parts, script, scripted

GREEDY = SamplingParams(temperature=0.0, max_tokens=30)


def test_results_come_in_the_order_of_the_prompts() -> None:
    executor = scripted(
        script("first", prompt_contains="one"), script("the second one", prompt_contains="two"), script("3rd")
    )
    with Engine(make_parts(executor)) as engine:
        outputs = engine.generate(["two", "one", "three", TokensPrompt([1, 2], text="ids")], [GREEDY] * 4)
        assert [o.outputs[0].text for o in outputs] == ["the second one", "first", "3rd", "Hello"]
        assert [o.prompt for o in outputs] == ["two", "one", "three", "ids"]
        assert outputs[0].outputs[0].token_ids == (*b"the second one", EOS)
        assert outputs[3].prompt_token_ids == (1, 2)
        assert all(o.finished and o.outputs[0].finish_reason == "stop" for o in outputs)
        assert engine.stats().core.num_running == 0


def test_a_stop_string_ends_the_run_in_the_core_too() -> None:
    executor = scripted(default=script("tick ", repeat=True))
    with Engine(make_parts(executor)) as engine:
        params = SamplingParams(stop=("ick t",), max_tokens=None)
        (output,) = engine.generate(["x"], [params])
        assert (output.outputs[0].text, output.outputs[0].stop_reason) == ("t", "ick t")
        (again,) = engine.generate(["y"], [SamplingParams(max_tokens=4)])
        assert (again.outputs[0].text, again.outputs[0].finish_reason) == ("tick", "length")
        stats = engine.stats()
        assert (stats.core.num_running, stats.core.num_free_pages) == (0, 64)


@pytest.mark.parametrize("kind", list(OutputKind))
def test_results_are_whole_whatever_the_output_kind(kind: OutputKind) -> None:
    seen: list[RequestOutput] = []
    with Engine(make_parts(scripted())) as engine:
        (output,) = engine.generate(["x"], [SamplingParams(max_tokens=4, output_kind=kind)], seen.append)
    assert (output.outputs[0].text, output.outputs[0].token_ids) == ("Hell", tuple(b"Hell"))
    shown = [o.outputs[0].text for o in seen]
    expected = {"cumulative": ["H", "He", "Hel", "Hell"], "delta": ["H", "e", "l", "l"], "final_only": ["Hell"]}
    assert shown == expected[kind.value]


def test_one_wrong_prompt_runs_nothing() -> None:
    with Engine(make_parts(scripted())) as engine:
        with pytest.raises(RequestError, match="empty"):
            engine.generate(["fine", ""], [GREEDY, GREEDY])
        with pytest.raises(RequestError, match="2 prompts with 1 params"):
            engine.generate(["a", "b"], [GREEDY])
        assert engine.stats().core.num_steps == 0
        assert engine.generate([], []) == []


def test_an_error_of_the_caller_aborts_its_requests_and_comes_back() -> None:
    def on_update(output: RequestOutput) -> None:
        raise BrokenPipeError("the pipe")

    with Engine(make_parts(scripted(default=script("x", repeat=True)))) as engine:
        with pytest.raises(BrokenPipeError, match="the pipe"):
            engine.generate(["a", "b"], [SamplingParams(max_tokens=None)] * 2, on_update)
        (output,) = engine.generate(["c"], [SamplingParams(max_tokens=2)])
        assert output.outputs[0].text == "xx"
        assert engine.stats().totals.finished["abort"] == 2


def test_a_full_queue_is_a_capacity_error_and_the_engine_lives() -> None:
    settings = Settings(max_num_queued_reqs=2, max_num_seqs=1)
    with Engine(make_parts(scripted(step_s=0.01), settings)) as engine:
        with pytest.raises(CapacityError, match="max_num_queued_reqs=2"):
            engine.generate(["a"] * 8, [GREEDY] * 8)
        assert engine.generate(["a"], [GREEDY])[0].outputs[0].text == "Hello"


@pytest.mark.parametrize("kind", list(FaultKind))
def test_hlt_01_a_broken_executor_is_engine_dead(kind: FaultKind) -> None:
    executor = scripted(faults=[Fault(3, kind)])
    engine = Engine(make_parts(executor, Settings(watchdog_s=0.3)))
    with pytest.raises(EngineDead, match="frozen" if kind is FaultKind.FREEZE else "scripted fault"):
        engine.generate(["a", "b"], [GREEDY, GREEDY])
    with pytest.raises(EngineDead):
        engine.generate(["c"], [GREEDY])
    assert engine.stats().totals.finished["error"] == 2
    executor.release()
    engine.close()
    engine.close()


def test_a_closed_engine_refuses() -> None:
    engine = Engine(make_parts(scripted()))
    engine.close()
    with pytest.raises(EngineDead, match="closed"):
        engine.generate(["a"], [GREEDY])


def test_hlt_01_a_frozen_executor_does_not_keep_the_process() -> None:
    """And the whole of it runs with jax made unimportable."""
    program = """
import sys
from dataclasses import replace
sys.modules["jax"] = None
from tests.helpers.scripted_engine import Settings, make_parts, scripted
from jaxllm.engine.engine import Engine, Terms
from jaxllm.errors import EngineDead
from jaxllm.testing.faults import Fault, FaultKind
from jaxllm.types.sampling import SamplingParams
engine = Engine(make_parts(scripted(faults=[Fault(2, FaultKind.FREEZE)]), Settings(watchdog_s=0.2)))
try:
    engine.generate(["a"], [SamplingParams()])
except EngineDead:
    sys.exit(7)
"""
    done = subprocess.run([sys.executable, "-c", program], timeout=60, check=False)
    assert done.returncode == 7


def test_a_default_of_the_model_that_is_not_served_yet_is_left_out_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    parts = replace(make_parts(scripted()), default_params={"temperature": 0.5, "thinking_token_budget": 7})
    with Engine(parts) as engine:
        assert engine.default_params == {"temperature": 0.5}
    assert "thinking_token_budget=7" in caplog.text


def test_a_deadline_ends_its_own_request_and_leaves_the_others_of_the_batch_alone() -> None:
    executor = scripted(script("short", prompt_contains="s"), default=script("on ", repeat=True), step_s=0.002)
    hurried = Terms(service=ServiceParams(deadline_s=0.1))
    with Engine(make_parts(executor, Settings(max_num_seqs=1, max_model_len=1024, num_pages=301))) as engine:
        params = [SamplingParams(max_tokens=None), SamplingParams(max_tokens=None), GREEDY]
        running, waiting, other = engine.generate(["a", "b", "s"], params, terms=[hurried, hurried, Terms()])
        ends = [(o.outputs[0].finish_reason, o.outputs[0].stop_reason) for o in (running, waiting)]
        assert ends == [("abort", "deadline")] * 2
        assert running.outputs[0].text.startswith("on ") and not waiting.outputs[0].token_ids
        assert other.outputs[0].text == "short"
        assert engine.stats().totals.finished["abort"] == 2
