"""The section `cost:` of a simulation's file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm.errors import ConfigError
from jaxllm.sim.cost_spec import make_cost
from jaxllm.sim.devices import load_device
from jaxllm.sim.linear import Linear
from jaxllm.sim.models import load_model
from jaxllm.sim.roofline import Roofline
from jaxllm.sim.table_cost import Table
from tests.helpers.step_plans import plan_of

PLAN = plan_of(decodes=(10, 20))


def test_each_kind_is_made(tmp_path: Path) -> None:
    Linear(step_s=0.5).save(tmp_path / "l.json")
    Table(np.array([[2.0, 2, 32, 0.25]])).save(tmp_path / "t.json")
    expected = Roofline(load_device("h100"), load_model("llama-3-70b"), 8)
    specs = {
        expected.step_seconds(PLAN): {
            "kind": "roofline",
            "device": "h100",
            "model": "llama-3-70b",
            "tensor_parallel": 8,
        },
        0.5: {"kind": "linear", "file": "l.json"},
        0.25: {"kind": "table", "file": "t.json"},
        0.12: {"kind": "constant", "step_s": 0.1, "token_s": 0.01},
    }
    for seconds, spec in specs.items():
        assert make_cost(spec, "sim.yaml: cost", folder=tmp_path).step_seconds(PLAN) == pytest.approx(seconds)


def test_types_of_the_model_can_be_chosen() -> None:
    spec = {"kind": "roofline", "device": "h100", "model": "llama-3-8b"}
    half = make_cost({**spec, "weight_dtype": "float8"}, "cost").step_seconds(PLAN)
    assert half < 0.7 * make_cost(spec, "cost").step_seconds(PLAN)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({}, r"sim.yaml:3: cost: kind is missing"),
        ({"kind": "magic"}, r"kind='magic'; accepted: roofline, linear, table, constant"),
        ({"kind": "constant", "step_s": -1}, r"step_s=-1"),
        ({"kind": "constant", "step_s": 1, "tokens_s": 1}, r"tokens_s=1 is not known"),
        ({"kind": "linear"}, r"file is missing"),
        ({"kind": "linear", "file": "none.json"}, r"sim.yaml:3: cost: .*none.json cannot be read"),
        ({"kind": "roofline", "device": "h100"}, r"model is missing"),
        ({"kind": "roofline", "device": "z80", "model": "llama-3-8b"}, r"device='z80' is not known; accepted: a100, b"),
        ({"kind": "roofline", "device": "h100", "model": "llama-3-8b", "tensor_parallel": 5}, r"tensor_parallel=5 on"),
        ({"kind": "roofline", "device": "h100", "model": "llama-3-8b", "kv_dtype": "x"}, r"kv_dtype='x'; accepted: fl"),
    ],
)
def test_a_wrong_section_is_refused(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^sim.yaml:3: cost: .*{message.removeprefix('sim.yaml:3: cost: ')}"):
        make_cost(spec, "sim.yaml:3: cost")
