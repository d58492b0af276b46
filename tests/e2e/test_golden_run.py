"""The real model through the command line: exactly the ids that transformers gives."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

GOLDEN = json.loads((Path(__file__).parents[1] / "golden/smollm2-golden.json").read_text())["prompts"]


@pytest.mark.slow
def test_run_gives_the_golden_ids(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    entries = [{"messages": [{"role": "user", "content": golden["user"]}], "max_tokens": 64} for golden in GOLDEN]
    file.write_text("\n".join(map(json.dumps, entries)))
    flags = ["--json", "--temperature", "0", "--ignore-eos", "--dtype", "float32", "--prompts", str(file)]
    limits = ["--max-num-seqs", "8", "--max-num-batched-tokens", "64", "--max-model-len", "128", "--verbose"]
    command = [sys.executable, "-m", "jaxllm", "run", *flags, *limits]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert [result["prompt_token_ids"] for result in results] == [golden["prompt_token_ids"] for golden in GOLDEN]
    assert [result["token_ids"] for result in results] == [golden["output_token_ids"] for golden in GOLDEN]
    assert {result["finish_reason"] for result in results} == {"length"}
    for phase in ("read config", "tokenizer", "import jax", "weights", "compile", "allocate"):
        assert phase in done.stderr
    assert "kv pages" in done.stderr
