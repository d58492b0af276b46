"""The default model against transformers' own output, recorded in tests/golden (greedy, float32, eager)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.slow
def test_run_command_prints_the_golden_ids(tmp_path: Path) -> None:
    """The command of the contract, chat template included."""
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"messages": [{"role": "user", "content": entry["user"]}], "max_tokens": 64} for entry in golden()]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = [sys.executable, "-m", "jaxllm", "run", "--prompts", str(prompts), "--json", "--temperature", "0"]
    command += ["--ignore-eos", "--dtype", "float32"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    printed = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["prompt_token_ids"] for line in printed] == [entry["prompt_token_ids"] for entry in golden()]
    assert [line["token_ids"] for line in printed] == [entry["output_token_ids"] for entry in golden()]
