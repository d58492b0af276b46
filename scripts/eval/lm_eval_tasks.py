"""Tasks for lm-eval that need no download: two multiple choices made of GSM8K rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_YAML = """\
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: context
doc_to_choice: choices
doc_to_target: label
target_delimiter: ""
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
metadata:
  version: 1
"""


def write_tasks(rows_file: Path, folder: Path) -> list[str]:
    """Write the data and the description of each task; their names."""
    rows = [json.loads(line) for line in rows_file.read_text(encoding="utf-8").splitlines()]
    tasks = {"gsm8k_number": _numbers(rows), "gsm8k_first_step": _first_steps(rows)}
    for name, items in tasks.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(item) + "\n" for item in items))
        (folder / f"{name}.yaml").write_text(_YAML.format(name=name, data=data))
    return list(tasks)


def _numbers(rows: list[dict[str, str]]) -> list[dict[str, Any]]:
    """Which number is the answer: short continuations."""
    items = []
    for index, row in enumerate(rows):
        right = int(row["answer"].rsplit("####", 1)[1].replace(",", ""))
        choices = [f" {number}" for number in (right, right + 1, right + 100, right * 10 + 7)]
        items.append(_item(f"Question: {row['question']}\nThe answer is", choices, index))
    return items


def _first_steps(rows: list[dict[str, str]]) -> list[dict[str, Any]]:
    """Which first step belongs to the question: longer continuations, the others from the rows that follow."""
    steps = [row["answer"].splitlines()[0] for row in rows]
    items = []
    for index, row in enumerate(rows):
        choices = [" " + steps[(index + offset) % len(steps)] for offset in range(4)]
        items.append(_item(f"Question: {row['question']}\nAnswer:", choices, index))
    return items


def _item(context: str, choices: list[str], index: int) -> dict[str, Any]:
    """The right choice comes first in `choices`; it is put at a place that changes from item to item."""
    place = index % len(choices)
    right, *others = choices
    return {"context": context, "choices": [*others[:place], right, *others[place:]], "label": place}
