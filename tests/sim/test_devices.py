"""Described devices: peaks as published, wrong descriptions refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxllm.errors import ConfigError
from jaxllm.sim.devices import device_names, load_device

DESCRIPTIONS = Path(__file__).parents[2] / "configs" / "cost" / "devices"


def test_all_devices_are_described_with_their_sources() -> None:
    assert {"v5e", "v5p", "v6e", "tpu7x", "a100", "h100", "h200", "b200", "cpu"} <= set(device_names())
    for name in device_names():
        device = load_device(name)
        assert device.source
        assert name == "cpu" or any("https://" in line for line in device.source)


@pytest.mark.parametrize(
    ("name", "intensity"),  # FLOP a byte from which on bfloat16 products are not bound by memory, at the peaks
    [
        ("v5e", 240),
        ("v5p", 166),
        ("v6e", 560),
        ("tpu7x", 313),
        ("a100", 153),
        ("h100", 295),
        ("h200", 206),
        ("b200", 281),
    ],
)
def test_ridge_points_are_those_known(name: str, intensity: float) -> None:
    device = load_device(name)
    assert device.peak_flops["bfloat16"] / device.memory_bandwidth_bytes_s == pytest.approx(intensity, rel=0.01)


def test_a_type_without_units_is_widened() -> None:
    a100, cpu = load_device("a100"), load_device("cpu")
    assert a100.flops_per_s("float8") == a100.flops_per_s("bfloat16") == 312e12 * a100.matmul_efficiency
    assert cpu.flops_per_s("bfloat16") == cpu.flops_per_s("float32")


def test_a_ring_sends_almost_twice_the_bytes() -> None:
    h100 = load_device("h100")
    assert h100.all_reduce_s(1e9, 1) == 0
    assert h100.all_reduce_s(8e9, 8) == pytest.approx(14 * (1e9 / 450e9 + h100.interconnect_latency_s))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"matmul_efficiency": 1.5}, r"matmul_efficiency=1.5; accepted: a share of the peak"),
        ({"memory_bytes": 0}, r"memory_bytes=0; accepted: a number above 0"),
        ({"memory_bytes": float("inf")}, r"memory_bytes=inf"),
        ({"launch_s": -1}, r"launch_s=-1; accepted: a number of at least 0"),
        ({"peak_flops": {"float8": 1}}, r"peak_flops=.*accepted: bfloat16 or float32"),
        ({"peak_flops": {"bfloat16": "fast"}}, r"peak_flops.bfloat16='fast'"),
        ({"num_devices": 1.5}, r"num_devices=1.5"),
        ({"source": "me"}, r"source='me'; accepted: a list of texts"),
    ],
)
def test_a_wrong_field_is_named(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    path = tmp_path / "device.json"
    path.write_text(json.dumps({**json.loads((DESCRIPTIONS / "h100.json").read_text()), **changes}, indent=1))
    with pytest.raises(ConfigError, match=rf"device.json, line \d+: {message}"):
        load_device(str(path))
