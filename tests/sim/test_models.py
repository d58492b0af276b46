"""Described models have the sizes that were published."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from jaxllm.errors import ConfigError
from jaxllm.sim.models import load_model, model_names


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("llama-3-8b", 8_030_261_248, 8_030_261_248),
        ("llama-3-70b", 70_553_706_496, 70_553_706_496),
        ("llama-3.1-405b", 405.9e9, 405.9e9),
        ("mixtral-8x7b", 46.7e9, 12.9e9),
        ("qwen3-30b-a3b", 30.5e9, 3.3e9),
        ("deepseek-v3", 671.0e9, 37e9),
        ("smollm2-135m", 134_515_008, 134_515_008),
    ],
)
def test_totals_are_those_published(name: str, total: float, active: float) -> None:
    model = load_model(name)
    assert model.num_params == pytest.approx(total, rel=1e-9 if isinstance(total, int) else 2e-3)
    assert model.active_params == pytest.approx(active, rel=1e-9 if isinstance(active, int) else 2e-2)


@pytest.mark.parametrize(
    ("name", "num_bytes"),
    [("llama-3-8b", 131_072), ("llama-3-70b", 327_680), ("deepseek-v3", 70_272), ("smollm2-135m", 23_040)],
)
def test_a_token_keeps_as_many_bytes_as_published(name: str, num_bytes: int) -> None:
    assert load_model(name).kv_bytes_per_token == num_bytes


def test_types_can_be_chosen() -> None:
    model = load_model("llama-3-8b", weight_dtype="int4", kv_dtype="float8")
    assert model.weight_bytes == 8_030_261_248 / 2
    assert model.kv_bytes_per_token == 65_536


def test_distinct_experts_are_what_drawing_them_finds() -> None:
    model = load_model("qwen3-30b-a3b")
    rng = np.random.default_rng(0)
    for num_tokens in (1, 4, 30, 200):
        draws = [len({e for _ in range(num_tokens) for e in rng.permutation(128)[:8].tolist()}) for _ in range(200)]
        assert model.distinct_experts(num_tokens) == pytest.approx(float(np.mean(draws)), rel=0.02)


def test_every_description_can_be_read_and_says_where_it_is_from() -> None:
    assert {"llama-3-8b", "llama-3-70b", "deepseek-v3", "smollm2-135m"} <= set(model_names())
    for name in model_names():
        assert load_model(name).num_params > 0


def edited(tmp_path: Path, name: str, **changes: object) -> Path:
    source = Path(__file__).parents[2] / "configs" / "cost" / "models" / f"{name}.json"
    values = {**json.loads(source.read_text()), **changes}
    path = tmp_path / "model.json"
    path.write_text(json.dumps({k: v for k, v in values.items() if v is not None}, indent=2))
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": "many"}, r"model.json, line 5: heads='many'; accepted: an integer of at least 1"),
        ({"heads": 0}, r"line 5: heads=0; accepted: an integer of at least 1"),
        ({"heads": True}, r"heads=True"),
        ({"kv_dtype": "half"}, r"kv_dtype='half'; accepted: float32, bfloat16"),
        ({"colour": 1}, r"colour=1 is not known"),
        ({"hidden": None}, r"hidden is missing"),
        ({"experts": {"num": 4, "active": 5, "intermediate": 8}}, r"experts.active=5; accepted: at most num=4"),
        ({"experts": {"num": 4, "active": 1, "intermediate": 8, "dense_layers": 61}}, r"experts.dense_layers=61"),
        ({"latent": 3}, r"latent=3; accepted: an object"),
        ({"latent": {"kv_lora_rank": 3}}, r"latent.nope_head_dim is missing"),
    ],
)
def test_a_wrong_field_is_named(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_model(str(edited(tmp_path, "deepseek-v3", **changes)))


def test_an_unknown_name_is_answered_with_those_known() -> None:
    with pytest.raises(ConfigError, match=r"model='gpt-9' is not known; accepted: deepseek-v3, llama-3-70b, .* file"):
        load_model("gpt-9")


def test_broken_json_is_answered_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    path.write_text('{\n "name": "x",\n oops\n}')
    with pytest.raises(ConfigError, match=r"m.json, line 3: not JSON"):
        load_model(str(path))
    path.write_text("[]")
    with pytest.raises(ConfigError, match="holds list; accepted: a JSON object"):
        load_model(str(path))
    with pytest.raises(ConfigError, match="cannot be read"):
        load_model(str(tmp_path / "none.json"))
