"""The page for newcomers: its policy is loaded as it says, and does what it says."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from jaxllm.scheduler.registry import create_policy
from jaxllm.types.sampling import SamplingParams
from tests.scheduler.driver import Driver

PAGE = Path(__file__).parents[2] / "docs" / "adding-a-policy.md"


def test_the_policy_of_the_page_runs_and_does_what_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip() and not line.startswith(("from", "import"))]) <= 20
    (tmp_path / "my_policies.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_policies", raising=False)
    driver = Driver(policy=create_policy("my_policies:ShortPromptFirst", {"patience_s": 5}), max_num_seqs=1)
    once = SamplingParams(max_tokens=1)
    ages = {"old": (9, -10.0), "long": (7, 0.0), "short": (2, 0.0)}
    added = {name: driver.add((1,) * size, once, arrival_s=at_s) for name, (size, at_s) in ages.items()}
    ended: list[str] = []
    while driver.scheduler.has_unfinished:
        driver.step()
        ended += [name for name, request in added.items() if request.is_finished and name not in ended]
    assert ended == ["old", "short", "long"]
    assert driver.scheduler.num_policy_faults == 0
