"""A roofline against arithmetic done by hand, one row and one layer at a time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from jaxllm.errors import ConfigError
from jaxllm.sim.cost import shape_of
from jaxllm.sim.devices import Device, load_device
from jaxllm.sim.models import ModelShape, load_model
from jaxllm.sim.roofline import Roofline
from jaxllm.types.step import SchedulerOutput
from tests.helpers.step_plans import plan_of, random_plan

LLAMA = load_model("llama-3-8b")


def ideal(name: str) -> Device:
    """A device that reaches its peaks and starts at once."""
    return replace(load_device(name), matmul_efficiency=1.0, bandwidth_efficiency=1.0, launch_s=0.0)


def by_hand(device: Device, model: ModelShape, plan: SchedulerOutput) -> float:
    """A dense model on one device: FLOPs and bytes of its matrices, rows and heads, summed with loops."""
    peak, bandwidth = device.peak_flops["bfloat16"], device.memory_bandwidth_bytes_s
    h, d, i = model.hidden, model.head_dim, model.intermediate
    queries, keys, mlp = model.heads * d, model.kv_heads * d, [(h, i), (h, i), (i, h)]
    matrices = [(h, queries), (h, keys), (h, keys), (queries, h), *mlp]
    tokens = int(plan.rows.num_tokens.sum())
    layer_flops = sum(2 * tokens * a * b for a, b in matrices)
    layer_bytes = sum(2 * a * b + 2 * tokens * (a + b) for a, b in matrices) + 2 * 2 * h  # and the norms
    layer_bytes -= 2 * tokens * 3 * h  # q, k, v, gate and up read their input once
    linear = model.num_layers * max((layer_flops + 2 * tokens * 2 * h) / peak, layer_bytes / bandwidth)
    pairs = reads = 0
    for start, num in zip(plan.rows.starts.tolist(), plan.rows.num_tokens.tolist(), strict=True):
        pairs += sum(start + n for n in range(1, num + 1))
        reads += start + num
    kv_bytes = 2 * model.kv_heads * d * 2 * (reads + tokens)
    attention = model.num_layers * max(pairs * model.heads * d * 4 / peak, kv_bytes / bandwidth)
    samples = int(plan.rows.samples.sum())
    head_bytes = 2 * h * model.vocab + 2 * samples * model.vocab
    head = max(2 * samples * h * model.vocab / peak, head_bytes / bandwidth) if samples else 0.0
    return linear + attention + head


def test_random_steps_take_what_is_found_by_hand() -> None:
    rng = np.random.default_rng(1)
    for name in ("h100", "v5e"):
        device = ideal(name)
        roofline = Roofline(device, LLAMA)
        for _ in range(50):
            plan = random_plan(rng)
            assert roofline.step_seconds(plan) == pytest.approx(by_hand(device, LLAMA, plan), rel=2e-3)


def test_one_decode_takes_as_long_as_reading_the_weights() -> None:
    weights = (LLAMA.num_params - LLAMA.hidden * LLAMA.vocab) * 2  # one row of the embedding, not all
    seconds = Roofline(ideal("h100"), LLAMA).step_seconds(plan_of(decodes=(0,)))
    assert seconds == pytest.approx(weights / 3350e9, rel=1e-3)


def test_a_long_prefill_takes_as_long_as_its_arithmetic() -> None:
    num = 8192
    matrices = 2 * (LLAMA.num_params - 2 * LLAMA.hidden * LLAMA.vocab) * num
    attention = 4 * 32 * 32 * 128 * num * (num + 1) / 2
    seconds = Roofline(ideal("h100"), LLAMA).step_seconds(plan_of(prefills=((0, num),), samples=(False,)))
    assert seconds == pytest.approx((matrices + attention) / 989.4e12, rel=1e-4)


def test_devices_share_the_work_and_wait_for_each_other() -> None:
    device, model, plan = ideal("h100"), load_model("llama-3-70b"), plan_of(decodes=(1000,) * 16)
    alone, together = (Roofline(device, model, num).parts(shape_of(plan)) for num in (1, 8))
    assert together.attention == pytest.approx(alone.attention / 8)
    assert together.head == pytest.approx(alone.head / 8)
    assert together.linear == pytest.approx(alone.linear / 8, rel=0.01)  # inputs of full width are read by all
    ring = 14 * (16 * 8192 * 2 / 8 / 450e9 + device.interconnect_latency_s)
    assert together.collectives == pytest.approx(2 * 80 * ring)
    assert alone.collectives == 0


def test_more_devices_than_kv_heads_keep_copies() -> None:
    model = load_model("llama-3-70b")
    kv = {num: Roofline(ideal("v5p"), model, num).parts(shape_of(plan_of(decodes=(9000,) * 64))) for num in (8, 16)}
    assert kv[16].attention == pytest.approx(kv[8].attention)


def test_latents_are_read_by_each_device() -> None:
    model = load_model("deepseek-v3")
    parts = Roofline(ideal("h200"), model, 8).parts(shape_of(plan_of(decodes=(5000,) * 64)))
    flops = 61 * 128 * 2 * (512 + 64 + 512) * 64 * 5001 / 8 / 989.4e12
    assert parts.attention == pytest.approx(max(flops, 70_272 * 64 * 5002 / 4800e9))


def test_few_tokens_read_few_experts() -> None:
    model = load_model("deepseek-v3")
    roofline = Roofline(ideal("h200"), model, 8)
    one, many = (roofline.parts(shape_of(plan_of(decodes=(0,) * num))) for num in (1, 2000))
    assert one.linear == pytest.approx((model.active_params - 2 * model.head_params) / 8 / 4800e9, rel=0.01)
    assert many.linear > (model.num_params - 2 * model.head_params) / 8 / 4800e9


def test_more_work_never_takes_less() -> None:
    rng = np.random.default_rng(2)
    rooflines = [Roofline(load_device("a100"), load_model(name), 8) for name in ("llama-3-8b", "deepseek-v3")]
    for _ in range(100):
        less = shape_of(random_plan(rng))
        more = less._replace(**{name: value * 1.5 for name, value in less._asdict().items()})
        for roofline in rooflines:
            assert 0 < roofline.seconds(less) <= roofline.seconds(more)


def test_kv_memory_is_what_the_weights_leave() -> None:
    h100 = load_device("h100")
    tokens = Roofline(h100, LLAMA).kv_capacity_tokens(memory_utilization=0.9)
    assert tokens == int((72e9 - 8_030_261_248 * 2) / 131_072)
    assert Roofline(h100, load_model("llama-3-70b")).kv_capacity_tokens() == 0
    assert Roofline(h100, load_model("llama-3-70b"), 4).kv_capacity_tokens() > 0


@pytest.mark.parametrize("num", [0, 3, 16])
def test_a_split_that_cannot_be_is_refused(num: int) -> None:
    with pytest.raises(ConfigError, match=rf"tensor_parallel={num} .*accepted: 1, 2, 4, 8$"):
        Roofline(load_device("h100"), LLAMA, num)
