from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.config.engine import CacheConfig
from jaxllm.errors import CapacityError, ConfigError
from jaxllm.memory.plan import KVCachePlan
from jaxllm.memory.spec import FullKV
from jaxllm.runner.memory_plan import MemoryPlan, page_bytes, plan_pages, round_down, total_memory, weights_bytes
from tests.runner.oracle_model import OracleModel

MODEL: Any = OracleModel()
PAGE = 2 * 16 * 2 * 4  # bytes: two layers, 16 tokens, key and value of one number, float32


@dataclass
class Device:
    """What the plan asks of a device."""

    platform: str = "gpu"
    device_kind: str = "imagined"
    stats: dict[str, int] | None = field(default_factory=lambda: {"bytes_limit": 1000 * PAGE})

    def memory_stats(self) -> dict[str, int] | None:
        return self.stats


def plan(device: Any, budget_bytes: int, temporaries: int = 0, max_num_seqs: int = 64, **cache: Any) -> KVCachePlan:
    return plan_pages(
        MODEL,
        CacheConfig(**cache),
        max_num_seqs=max_num_seqs,
        max_model_len=256,
        device=device,
        budget_bytes=budget_bytes,
        probe_temporaries=lambda: temporaries,
    )


def test_a_page_costs_what_the_model_lays_out() -> None:
    assert page_bytes(MODEL, 16, "float32") == PAGE


def test_a_cpu_gives_a_quarter_of_free_memory_to_pages_in_round_numbers() -> None:
    assert plan(Device("cpu"), 4 * 100 * PAGE).num_pages == 96  # 100 is 0b1100100
    assert plan(Device("cpu"), 4 * 109 * PAGE).num_pages == 96, "a little more free memory changes no shape"


def test_a_cpu_gives_pages_two_gib_at_most() -> None:
    pages = plan(Device("cpu"), 2**50, max_num_seqs=2**20).num_pages
    assert pages == 2 * 2**30 // PAGE


def test_an_accelerator_gives_pages_what_weights_and_temporaries_leave() -> None:
    budget = weights_bytes(MODEL) + 64 * PAGE + 5000
    assert plan(Device(), budget, temporaries=5000).num_pages == 64
    assert plan(Device(), budget + PAGE * 15, temporaries=5000).num_pages == 64, "79, rounded down to 3 binary digits"


def test_an_explicit_budget_is_used_to_the_page() -> None:
    assert plan(Device("cpu"), 2**40, memory_bytes=101 * PAGE + 5).num_pages == 101


def test_an_explicit_number_of_pages_is_taken_as_it_is() -> None:
    assert plan(Device("cpu"), 2**40, num_pages=7).num_pages == 7


def test_more_pages_than_all_requests_could_hold_are_not_made() -> None:
    assert plan(Device("cpu"), 2**40, max_num_seqs=3).num_pages == 3 * 16 + 1


def test_rounding_never_refuses_a_model_len_that_fits() -> None:
    assert plan(Device("cpu"), 4 * 17 * PAGE).num_pages == 17  # 256 tokens need 16 and the null page


def test_too_little_memory_names_the_longest_model_len_that_fits() -> None:
    with pytest.raises(CapacityError, match=r"max_model_len=256 needs .* longest max_model_len that fits is 144"):
        plan(Device("cpu"), 2**40, memory_bytes=10 * PAGE)


def test_layers_of_two_kinds_are_refused() -> None:
    class Mixed(OracleModel):
        def kv_specs(self, page_size: int, dtype: str) -> tuple[FullKV, ...]:
            return (FullKV(page_size, 1, 1, dtype), FullKV(page_size, 2, 1, dtype))

    with pytest.raises(ConfigError, match="2 kinds of KV pages"):
        plan_pages(
            Mixed(),  # type: ignore[arg-type]
            CacheConfig(),
            max_num_seqs=1,
            max_model_len=16,
            device=Device("cpu"),  # type: ignore[arg-type]
            budget_bytes=2**30,
            probe_temporaries=lambda: 0,
        )


def test_memory_of_a_device_is_the_share_that_was_asked_for() -> None:
    device: Any = Device()
    assert total_memory(device, 0.5) == 500 * PAGE
    device.stats = None
    with pytest.raises(ConfigError, match="does not tell its memory"):
        total_memory(device, 0.5)


def test_parts_beyond_the_budget_are_listed() -> None:
    fits = MemoryPlan((("weights", 60), ("kv pages", 40)), 100)
    fits.check()
    assert fits.table()[-2:] == (("used", 100), ("budget", 100))
    with pytest.raises(CapacityError, match=r"100 bytes are needed \(weights 60, kv pages 40\) and 99 are there"):
        MemoryPlan(fits.rows, 99).check()


@given(st.integers(0, 2**40))
def test_rounding_down_keeps_few_digits_and_most_of_the_number(number: int) -> None:
    rounded = round_down(number)
    assert rounded <= number < max(rounded * 5 / 4, 8)
    assert bin(rounded).rstrip("0").count("1") <= 3
