"""Beam search on a tiny model against transformers' own. tests/engine holds the search to a known distribution."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from jaxllm.config.checkpoint import load_model_config
from jaxllm.config.engine import CacheConfig, LogprobsConfig, SchedulerConfig
from jaxllm.engine.engine import Engine
from jaxllm.engine.inputs import TokensPrompt
from jaxllm.engine.parts import EngineParts
from jaxllm.memory.manager import KVManager
from jaxllm.runner.start import StartOptions, start_runner
from jaxllm.scheduler.registry import create_policy
from jaxllm.scheduler.scheduler import Scheduler
from jaxllm.scheduler.stop import StopRules
from jaxllm.testing.byte_tokenizer import ByteLevelTokenizer
from jaxllm.types.sampling import BeamSearchParams
from tests.helpers.oracle import write_checkpoint

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.slow  # starts an engine of its own

TOKENIZER = ByteLevelTokenizer()
MAX_MODEL_LEN = 64
PROMPTS = [[5, 77, 130, 9], [200], list(range(40, 75))]


@dataclass(frozen=True)
class Both:
    engine: Engine
    theirs: Any

    def beams_of_theirs(self, prompt: list[int], params: BeamSearchParams) -> tuple[list[tuple[int, ...]], list[float]]:
        """Their sequences, best first, without ends, and the sums of log probabilities behind their scores."""
        found = self.theirs.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            num_beams=params.beam_width,
            num_return_sequences=params.beam_width,
            max_new_tokens=params.max_tokens,
            length_penalty=params.length_penalty,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )
        outputs = [tuple(row[len(prompt) :]) for row in found.sequences.tolist()]
        totals = [s * params.max_tokens**params.length_penalty for s in found.sequences_scores.tolist()]
        return outputs, totals


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    folder: Path = tmp_path_factory.mktemp("tiny")
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    write_checkpoint(folder, "llama", **shape, num_key_value_heads=2, vocab_size=TOKENIZER.vocab_size)
    scheduler = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=16, max_model_len=MAX_MODEL_LEN)
    cache = CacheConfig(page_size=8, num_pages=65)
    start = partial(
        start_runner, cache=cache, scheduler=scheduler, dtype="float32", options=StartOptions(eos_ids=[257])
    )
    options = StartOptions(eos_ids=[257])
    runner = start(load_model_config(folder), folder, logprobs=LogprobsConfig(max_logprobs=10), options=options)
    kv = KVManager(runner.kv_plan, enable_prefix_caching=True)
    stop = StopRules(frozenset({257}), MAX_MODEL_LEN)
    parts = EngineParts(
        executor=runner,
        scheduler=Scheduler(scheduler, kv, create_policy("fcfs"), stop),
        kv=kv,
        tokenizer=TOKENIZER,
        max_model_len=MAX_MODEL_LEN,
        vocab_size=TOKENIZER.vocab_size,
        model_name="tiny",
        eos_ids=frozenset({257}),
        max_logprobs=10,
    )
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    theirs.generation_config.eos_token_id = None
    with Engine(parts) as engine:
        yield Both(engine, theirs)
        assert runner.stats().compilations_after_ready == 0


@pytest.mark.parametrize("width", [2, 5])
@pytest.mark.parametrize("penalty", [0.0, 1.0])
def test_beams_are_those_of_transformers(both: Both, width: int, penalty: float) -> None:
    params = BeamSearchParams(beam_width=width, max_tokens=7, length_penalty=penalty, ignore_eos=True)
    outputs = both.engine.beam_search([TokensPrompt(prompt) for prompt in PROMPTS], params)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        sequences, totals = both.beams_of_theirs(prompt, params)
        assert [c.token_ids for c in output.outputs] == sequences
        assert [c.cumulative_logprob for c in output.outputs] == pytest.approx(totals, abs=1e-3)


def test_one_beam_is_the_greedy_answer(both: Both) -> None:
    params = BeamSearchParams(beam_width=1, max_tokens=7, ignore_eos=True)
    for prompt in PROMPTS:
        (output,) = both.engine.beam_search([TokensPrompt(prompt)], params)
        ids = torch.tensor([prompt])
        theirs = both.theirs.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=7, do_sample=False, pad_token_id=0
        )
        assert output.outputs[0].token_ids == tuple(theirs[0, len(prompt) :].tolist())
