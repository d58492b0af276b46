"""A plan's hash says all that was decided, and nothing else."""

from __future__ import annotations

import hashlib
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm.engine.trace import Decision, trace_path
from jaxllm.types.sampling import SamplingParams
from jaxllm.types.step import NewRequest, PageTableDiff, ScheduledRows, SchedulerOutput


def columns(*values: int) -> Any:
    return np.array(values, np.int32)


def make_plan() -> SchedulerOutput:
    return SchedulerOutput(
        step_id=3,
        new=(NewRequest("b", 1, (5, 6, 7), 3, SamplingParams(), seed=9, num_cached=0),),
        rows=ScheduledRows(("a", "b"), columns(0, 1), columns(8, 0), columns(1, 3), np.array([True, True]), 1),
        page_diffs=(PageTableDiff(columns(1), columns(0), columns(12)),),
    )


OTHERWISE: dict[str, Any] = {
    "step_id": 4,
    "new": (),
    "page_diffs": (PageTableDiff(columns(1), columns(0), columns(13)),),
    "preempted": ("c",),
    "finished": ("c",),
    "draft_ids": ((1,), ()),
    "adapter_slots": columns(0, 1),
    "page_copies": (((3, 4),),),
    "encoder_items": (("b", 0),),
    "num_steps": 2,
}
ROWS_OTHERWISE: dict[str, Any] = {
    "request_ids": ("a", "c"),
    "slots": columns(0, 2),
    "starts": columns(9, 0),
    "num_tokens": columns(1, 2),
    "samples": np.array([True, False]),
    "num_decode": 0,
}


def test_the_hash_is_that_of_the_plan_in_json_whatever_the_machine() -> None:
    token_hash = hashlib.blake2b(b"[5,6,7]", digest_size=16).hexdigest()
    new = (
        '[{"request_id":"b","slot":1,"num_tokens":3,"num_prompt_tokens":3,"num_cached":0,"seed":9,'
        f'"token_hash":"{token_hash}"}}]'
    )
    text = (
        '{"step":3,"request_ids":["a","b"],"slots":[0,1],"starts":[8,0],"num_tokens":[1,3],"samples":[true,true],'
        f'"num_decode":1,"new":{new},"pages":[[[1],[0],[12]]]}}'
    )
    assert Decision.of(make_plan()).hash == hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def test_every_field_counts() -> None:
    plan = make_plan()
    assert set(OTHERWISE) | {"rows"} == {field.name for field in fields(SchedulerOutput)}
    assert set(ROWS_OTHERWISE) == {field.name for field in fields(ScheduledRows)}
    others = [replace(plan, **{name: value}) for name, value in OTHERWISE.items()]
    others += [replace(plan, rows=replace(plan.rows, **{name: value})) for name, value in ROWS_OTHERWISE.items()]
    hashes = {Decision.of(each).hash for each in (plan, *others)}
    assert len(hashes) == 1 + len(others)


@pytest.mark.parametrize(
    "change",
    [
        {"request_id": "z"},
        {"slot": 2},
        {"token_ids": (5, 6, 8)},
        {"num_prompt_tokens": 2},
        {"seed": 1},
        {"num_cached": 1},
    ],
)
def test_a_new_request_counts_with_its_tokens(change: dict[str, Any]) -> None:
    plan = make_plan()
    other = replace(plan, new=(replace(plan.new[0], **change),))
    assert Decision.of(other).hash != Decision.of(plan).hash


def test_each_core_writes_a_file_of_its_own() -> None:
    assert [trace_path("d/t.jsonl", number) for number in range(3)] == [
        *(Path("d/t.jsonl"), Path("d/t.1.jsonl"), Path("d/t.2.jsonl")),
    ]
    assert trace_path("trace", 1) == Path("trace.1")
