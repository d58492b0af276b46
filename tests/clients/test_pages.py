"""docs/sampling.md and docs/api.md: their examples run, and they name everything there is."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import gguf
import pytest

import jaxllm
from jaxllm.config.checkpoint import resolve_model
from jaxllm.metrics.prometheus import PrometheusMetrics
from jaxllm.metrics.stats import CoreStats, EngineStats, RequestTotals
from jaxllm.server import errors, limits
from jaxllm.server.app import ROUTES
from jaxllm.server.schema import ChatRequest, CompletionRequest
from jaxllm.server.tokens import DetokenizeRequest, TokenizeRequest
from jaxllm.types.sampling import BeamSearchParams, SamplingParams
from scripts.eval.hf_folder import write_tokenizer
from tests.helpers.scripted_engine import script, scripted
from tests.server.harness import running

DOCS = Path(__file__).parents[2] / "docs"
TINY_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}


def examples_of(page: str) -> Iterator[Any]:
    """The Python blocks of a page, compiled so that a traceback names the page's own lines."""
    text = (DOCS / page).read_text()
    for block in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        lines_before = text.count("\n", 0, block.start(1))
        yield compile("\n" * lines_before + block[1], str(DOCS / page), "exec")


def run_examples(page: str) -> dict[str, Any]:
    """All blocks of a page, one after the other, in one namespace."""
    namespace: dict[str, Any] = {}
    blocks = list(examples_of(page))
    assert blocks
    for block in blocks:
        exec(block, namespace)
    return namespace


@pytest.fixture
def tiny_model(tmp_path: Path) -> Path:
    """A folder with the default model's tokenizer and a small llama's shapes; weights are made up."""
    reader = gguf.GGUFReader(resolve_model(None))
    write_tokenizer({name: field.contents() for name, field in reader.fields.items()}, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(TINY_LLAMA))
    return tmp_path


def test_the_sampling_pages_examples_run_on_a_tiny_model(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one_bucket = {"max_num_seqs": 1, "max_num_batched_tokens": 1}  # few programs: compiling is what takes time
    whole = jaxllm.LLM

    def tiny(**flags: Any) -> Any:
        return whole(str(tiny_model), **flags | one_bucket, load_format="dummy", dtype="float32")

    monkeypatch.setattr(jaxllm, "LLM", tiny, raising=False)
    run_examples("sampling.md")


@pytest.mark.slow
def test_the_sampling_pages_examples_run_on_the_default_model(capsys: pytest.CaptureFixture[str]) -> None:
    run_examples("sampling.md")
    assert "' Paris'" in capsys.readouterr().out


def test_the_api_pages_example_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with running(scripted(default=script("Paris, of course"))) as server:
        monkeypatch.setenv("JAXLLM_URL", server.url)
        run_examples("api.md")["client"].close()
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("Paris, of course")
    assert second == str(["Paris, o"] * 3)


def names_in(page: str) -> set[str]:
    """What stands in code type on a page, routes without their method too."""
    quoted = re.findall(r"`([^`\n]+)`", (DOCS / page).read_text())
    return set(quoted) | {word for text in quoted for word in re.findall(r"[\w/{}-]+", text)}


@pytest.mark.parametrize("params", [SamplingParams, BeamSearchParams])
def test_the_sampling_page_names_every_field(params: type) -> None:
    assert {field.name for field in fields(params)} - names_in("sampling.md") == set()


@pytest.mark.parametrize("schema", [ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest])
def test_the_api_page_names_every_field_of_a_request(schema: Any) -> None:
    assert set(schema.__struct_fields__) - names_in("api.md") == set()


def test_the_api_page_names_every_route() -> None:
    paths = {route.path.replace(":path", "") for route in ROUTES}
    assert len(paths) >= 11
    assert paths - names_in("api.md") == set()


def test_the_api_page_names_every_metric() -> None:
    stats = EngineStats(CoreStats(), RequestTotals())
    metrics = PrometheusMetrics(lambda: stats, model_name="m", max_model_len=16)
    families = {family.name for family in metrics.registry.collect()}
    own = {name.removeprefix("jaxllm:") for name in families if name.startswith("jaxllm:")}
    assert len(own) > 20
    assert own - names_in("api.md") == set()


def test_the_api_pages_limits_are_the_servers() -> None:
    text = (DOCS / "api.md").read_text()
    for row in (
        f"| {limits.MAX_PROMPTS}; {limits.MAX_N}; {limits.MAX_CHOICES} |",
        f"| messages | {limits.MAX_MESSAGES} |",
        f"| {limits.MAX_STOP_STRINGS}; {limits.MAX_STOP_CHARS}; {limits.MAX_STOP_TOKEN_IDS} |",
        f"| bad words | {limits.MAX_BAD_WORDS} |",
    ):
        assert row in text
    for status, code in errors._FIXED.values():
        assert f"| {status} | `server_error` | `{code}` |" in text
