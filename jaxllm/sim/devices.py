"""Accelerators as numbers: what a roofline needs to know of one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jaxllm.sim.cost_fields import Fields, described, names_of

DTYPE_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "float8": 1.0, "int8": 1.0, "float4": 0.5, "int4": 0.5}


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device. Peaks are the vendor's, dense; the efficiencies say what of them is reached."""

    name: str
    peak_flops: Mapping[str, float]  # FLOP/s of matrix products, by dtype
    memory_bandwidth_bytes_s: float
    memory_bytes: float
    launch_s: float  # of each step, whatever is in it
    matmul_efficiency: float  # share of `peak_flops` that is reached, 0 to 1
    bandwidth_efficiency: float  # share of `memory_bandwidth_bytes_s` that is reached
    interconnect_bytes_s: float  # that one device sends in a ring
    interconnect_latency_s: float  # of one hop of a ring
    num_devices: int  # that the interconnect joins: the most that can work as one
    source: tuple[str, ...]  # where the numbers are from, and which are assumed

    def flops_per_s(self, dtype: str) -> float:
        """FLOP/s that are reached in products of `dtype`; a type without units of its own is widened first."""
        for candidate in (dtype, "bfloat16", "float32"):
            if candidate in self.peak_flops:
                return self.peak_flops[candidate] * self.matmul_efficiency
        raise ValueError(f"device {self.name} has no peak_flops for {dtype}, bfloat16 or float32")

    @property
    def bytes_per_s(self) -> float:
        """Bytes a second of its memory that are reached."""
        return self.memory_bandwidth_bytes_s * self.bandwidth_efficiency

    def all_reduce_s(self, num_bytes: float, num_devices: int) -> float:
        """Seconds of a ring all-reduce of `num_bytes` on each of `num_devices`."""
        if num_devices == 1:
            return 0.0
        hops = 2 * (num_devices - 1)
        return hops * (num_bytes / num_devices / self.interconnect_bytes_s + self.interconnect_latency_s)


def load_device(name: str) -> Device:
    """By name (`device_names`), or from a JSON file of the same fields.

    Raises:
        ConfigError: there is none, or a field of it is wrong.
    """
    fields = described("devices", name)
    device = Device(
        name=fields.text("name"),
        peak_flops=_peaks(fields),
        memory_bandwidth_bytes_s=fields.number("memory_bandwidth_bytes_s", above=0),
        memory_bytes=fields.number("memory_bytes", above=0),
        launch_s=fields.number("launch_s"),
        matmul_efficiency=_share(fields, "matmul_efficiency"),
        bandwidth_efficiency=_share(fields, "bandwidth_efficiency"),
        interconnect_bytes_s=fields.number("interconnect_bytes_s", above=0),
        interconnect_latency_s=fields.number("interconnect_latency_s"),
        num_devices=fields.integer("num_devices"),
        source=fields.texts("source"),
    )
    fields.done()
    return device


def device_names() -> tuple[str, ...]:
    return names_of("devices")


def _peaks(fields: Fields) -> dict[str, float]:
    section = fields.section("peak_flops")
    given = section.names()
    unknown = [name for name in given if name not in DTYPE_BYTES]
    if unknown or not {"bfloat16", "float32"} & set(given):
        raise fields.error("peak_flops", given, f"bfloat16 or float32, and any of {', '.join(DTYPE_BYTES)}")
    return {name: section.number(name, above=0) for name in given}


def _share(fields: Fields, name: str) -> float:
    value = fields.number(name, above=0)
    if value > 1:
        raise fields.error(name, value, "a share of the peak, above 0 and at most 1")
    return value
