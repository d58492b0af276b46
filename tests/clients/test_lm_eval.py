"""lm-eval over the served model, against lm-eval over transformers; and the parts of that comparison."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.eval.lm_eval import Likelihood, report
from scripts.eval.lm_eval_tasks import write_tasks

REPO = Path(__file__).parents[2]
ROWS = REPO / "tests/golden/gsm8k-test-40.jsonl"


@pytest.mark.slow
def test_log_likelihoods_over_the_server_are_those_of_transformers() -> None:
    command = [sys.executable, "-m", "scripts.eval.lm_eval", "--limit", "10"]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ok: 80 log likelihoods" in done.stdout


def test_tasks_hold_the_right_choice_at_changing_places(tmp_path: Path) -> None:
    assert write_tasks(ROWS, tmp_path) == ["gsm8k_number", "gsm8k_first_step"]
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()]
    for name in ("gsm8k_number", "gsm8k_first_step"):
        items = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        assert len(items) == 40
        assert [item["label"] for item in items] == [index % 4 for index in range(40)]
        assert all(len(set(item["choices"])) == 4 for item in items)
        for item, row in zip(items, rows, strict=True):
            right = item["choices"][item["label"]].strip()
            assert right == row["answer"].split("#### ")[1].replace(",", "") or row["answer"].startswith(right)


def found(*values: float, is_greedy: bool = False) -> dict[tuple[str, int, str], Likelihood]:
    return {("task", index, " yes"): Likelihood(value, is_greedy) for index, value in enumerate(values)}


def test_the_verdict_takes_each_likelihood_into_account(capsys: pytest.CaptureFixture[str]) -> None:
    assert report(found(-1.0, -2.0), found(-1.0005, -2.0)) == 0
    assert "largest difference 5.00e-04" in capsys.readouterr().out
    assert report(found(-1.0, -2.0), found(-1.0, -2.002)) == 1
    assert report(found(-1.0), found(-1.0, is_greedy=True)) == 1
    assert report(found(-1.0), found(-1.0, -2.0)) == 1
    for values in ((float("nan"), -1.0), (-1.0, float("nan"))):
        assert report(found(*values), found(-1.0, -1.0)) == 1
    assert report({}, {}) == 1
    assert report({("task", 0, " no"): Likelihood(-1.0, False)}, found(-1.0)) == 1  # not the same question
