"""Deltas that were not read one by one join to the same answer, in any pieces."""

from __future__ import annotations

from functools import reduce

from hypothesis import given
from hypothesis import strategies as st

from jaxllm.engine.merge import join_deltas, merge_outputs
from jaxllm.types.outputs import RequestOutput
from jaxllm.types.request import FinishReason
from jaxllm.types.sampling import OutputKind
from tests.engine.caller import Caller

TEXT = "naïve 🫠 text, stopped 你好".encode()
N = 3
tokens = st.dictionaries(st.integers(0, N - 1), st.integers(1, 4), max_size=N)  # bytes of each sequence in a step


def fed(kind: OutputKind, steps: list[dict[int, int]], stop: list[str]) -> list[RequestOutput]:
    caller = Caller(n=N, logprobs=1, prompt_logprobs=1, stop=stop, output_kind=kind)
    done = [0] * N
    for step in steps:
        caller.step({i: TEXT[done[i] : done[i] + count] for i, count in step.items()})
        for i, count in step.items():
            done[i] += count
    if not caller.outputs or not caller.outputs[-1].finished:
        caller.step({}, dict.fromkeys(range(N), FinishReason.LENGTH))
    return caller.outputs


@given(st.lists(tokens, max_size=20), st.data(), st.sampled_from([[], ["stop"], ["ve ", "好"]]))
def test_any_way_of_joining_gives_the_whole(steps: list[dict[int, int]], data: st.DataObject, stop: list[str]) -> None:
    deltas = fed(OutputKind.DELTA, steps, stop)
    (whole,) = fed(OutputKind.FINAL_ONLY, steps, stop)
    assert join_deltas(deltas) == whole
    cuts = sorted(data.draw(st.sets(st.integers(1, len(deltas)), max_size=5)) | {len(deltas)})
    read = [
        reduce(lambda a, b: merge_outputs(a, b, OutputKind.DELTA), deltas[start:end])
        for start, end in zip([0, *cuts], cuts, strict=False)
        if start < end
    ]
    assert join_deltas(read) == whole


def test_of_other_kinds_the_later_one_says_all() -> None:
    earlier, later = fed(OutputKind.CUMULATIVE, [{0: 1}, {0: 1, 1: 1}], [])[:2]
    assert merge_outputs(earlier, later, OutputKind.CUMULATIVE) is later
