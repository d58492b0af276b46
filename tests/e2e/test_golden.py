"""The default model against transformers' own output, recorded in tests/golden (greedy, float32, eager)."""

from __future__ import annotations

import json
from pathlib import Path

from jaxllm.engine.inputs import TokensPrompt
from jaxllm.types.sampling import SamplingParams
from tests.e2e.conftest import RunningModel

GOLDEN = Path(__file__).parents[1] / "golden" / "smollm2-golden.json"


def golden() -> list[dict]:
    return json.loads(GOLDEN.read_text())["prompts"]


def test_greedy_tokens_equal_the_golden_ones(smollm2: RunningModel) -> None:
    prompts = [TokensPrompt(entry["prompt_token_ids"]) for entry in golden()]
    params = [SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)] * len(prompts)
    outputs = smollm2.engine.generate(prompts, params)
    assert [list(o.outputs[0].token_ids) for o in outputs] == [entry["output_token_ids"] for entry in golden()]


def test_eos_of_the_checkpoint_ends_the_reply(smollm2: RunningModel) -> None:
    entry = golden()[0]
    params = [SamplingParams(max_tokens=64, temperature=0.0)]
    output = smollm2.engine.generate([TokensPrompt(entry["prompt_token_ids"])], params)[0]
    assert output.outputs[0].text == "The capital of France is Paris."
    assert output.outputs[0].finish_reason == "stop"
    assert output.num_generated_tokens == entry["eos_at"] + 1
