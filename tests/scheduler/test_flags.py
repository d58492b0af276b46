"""What the flags say reaches the scheduler that an engine is built with."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxllm.build import build_parts
from jaxllm.config.engine import EngineArgs
from jaxllm.errors import CapacityError, ConfigError
from jaxllm.types.request import Request
from jaxllm.types.sampling import SamplingParams


def scripted(folder: Path, **flags: object) -> EngineArgs:
    script = folder / "script.json"
    script.write_text('{"default": {"text": "hello", "repeat": true}}')
    return EngineArgs(executor=f"scripted:{script}", **flags)  # type: ignore[arg-type]


def request(name: str, num_prompt: int, priority: int) -> Request:
    params = SamplingParams(max_tokens=50, ignore_eos=True)
    return Request(name, (priority + 1,) * num_prompt, params, 1.0, priority=priority)


def test_policy_its_options_and_limits_come_from_flags(tmp_path: Path) -> None:
    flags = {"max_num_seqs": 1, "max_num_queued_tokens": 4, "long_prefill_token_threshold": 8}
    policy = {"scheduling_policy": "priority", "scheduling_policy_options": '{"ageing_s": 5}'}
    scheduler = build_parts(scripted(tmp_path, default_deadline_s=2.0, **flags, **policy)).scheduler
    low, high = request("low", 20, 3), request("high", 20, 0)
    scheduler.add(low)
    alone = scheduler.schedule(1.0)
    assert alone is not None and alone.total_tokens == 20, "a step of its own is not shared"
    scheduler.add(high)
    with pytest.raises(CapacityError, match="max_num_queued_tokens=4"):
        scheduler.add(request("more", 2, 0))
    plan = scheduler.schedule(1.0)
    assert plan is not None and (plan.rows.request_ids, plan.preempted) == (("high",), ("low",))
    assert plan.total_tokens == 8, "nor is one that somebody waits beside taken whole"
    assert scheduler.expire(3.0) == [low, high]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"scheduling_policy": "priority", "scheduling_policy_options": '{"age": 5}'}, "has no option age"),
        ({"scheduling_policy_options": "[1]"}, "scheduling_policy_options='\\[1\\]'; accepted: a JSON object"),
        ({"decode_budget_share": 1.0}, "decode_budget_share=1.0 is out of range; accepted: at least 0, below 1"),
        ({"default_deadline_s": 0.0}, "default_deadline_s=0.0 is out of range; accepted: above 0"),
        ({"max_num_partial_prefills": 0}, "max_num_partial_prefills=0 is out of range"),
    ],
)
def test_wrong_flags_are_refused_by_name(tmp_path: Path, flags: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_parts(scripted(tmp_path, **flags))
