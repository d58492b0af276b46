"""The whole default model as one number: perplexity on GSM8K, against transformers (tests/golden/README.md)."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from jaxllm import LLM, RequestOutput, SamplingParams
from jaxllm.engine.inputs import TokensPrompt
from jaxllm.tokenizer.base import Tokenizer
from scripts.eval.windows import cut, joined_rows, score, together
from tests.e2e.conftest import RunningModel

REPO = Path(__file__).parents[2]
ROWS = REPO / "tests/golden/gsm8k-test-40.jsonl"
WINDOW, NUM_TOKENS = 512, 4096
# transformers 5.24.0, float32, eager attention, sums in float64
FIRST_WINDOW_NLL = 1.749413
NLL = 1.788649
PERPLEXITY = 5.9814


def windows_of(tokenizer: Tokenizer) -> list[Sequence[int]]:
    return cut(tokenizer.encode(joined_rows(ROWS), False)[:NUM_TOKENS], WINDOW)


def test_the_first_window_is_as_surprising_as_to_transformers(smollm2: RunningModel) -> None:
    def generate(prompts: list[list[int]], params: SamplingParams) -> list[RequestOutput]:
        return smollm2.engine.generate([TokensPrompt(ids) for ids in prompts], [params] * len(prompts))

    (found,) = score(generate, windows_of(smollm2.parts.tokenizer)[:1])
    assert found.num_tokens == WINDOW - 1
    assert found.nll == pytest.approx(FIRST_WINDOW_NLL, abs=1e-4)


@pytest.mark.slow
def test_perplexity_on_gsm8k_is_that_of_transformers() -> None:
    """As many tokens fit as a window has; the step's budget cuts windows into chunks, four windows at once."""
    with LLM(dtype="float32", max_model_len=WINDOW, max_num_seqs=4, max_num_batched_tokens=256) as llm:
        windows = windows_of(llm.tokenizer)
        found = together(score(llm.generate, windows))
    assert len(windows) == 8
    assert found.num_tokens == 8 * (WINDOW - 1)
    assert found.nll == pytest.approx(NLL, abs=1e-4)
    assert found.perplexity == pytest.approx(PERPLEXITY, rel=2e-3)


@pytest.mark.slow
def test_the_tool_prints_what_the_engine_scored() -> None:
    tool = [sys.executable, "-m", "scripts.eval.perplexity", "--text", str(ROWS), "--jsonl", "--json"]
    options = ["--window", str(WINDOW), "--max-windows", "1", "--dtype", "float32"]
    done = subprocess.run([*tool, *options], cwd=REPO, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["nll"] == pytest.approx(FIRST_WINDOW_NLL, abs=1e-4)
    assert found["perplexity"] == pytest.approx(math.exp(found["nll"]))
    assert found["num_tokens"] == WINDOW - 1


def test_a_text_is_cut_into_whole_windows() -> None:
    assert cut(range(10), 4) == [range(4), range(4, 8)]
    assert cut(range(10), 4, 1) == [range(4)]
    assert cut(range(3), 4) == [range(3)]
    with pytest.raises(ValueError, match="at least two tokens"):
        cut([1], 4)
