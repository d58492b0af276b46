"""What goes where before ready: weights + KV pages + the largest temporary + host buffers within the budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from jaxllm.config.engine import CacheConfig
from jaxllm.errors import CapacityError, ConfigError
from jaxllm.memory.plan import KVCachePlan, KVGroup, group_layers, plan_kv
from jaxllm.memory.spec import pages_for
from jaxllm.runner.kv_buffers import Device, num_bytes
from jaxllm.types.sampling import MAX_LOGPROB_TOKEN_IDS

if TYPE_CHECKING:
    from jaxllm.models.base import SplitModel

CPU_KV_SHARE = 4  # KV pages take at most a quarter of free memory ...
CPU_MAX_KV_BYTES = 2 * 2**30  # ... and no more than this
SIGNIFICANT_BITS = 3  # of num_pages: it is in every program's shape, and free memory differs a little each start


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Named bytes and the budget they share."""

    rows: tuple[tuple[str, int], ...]
    budget_bytes: int

    @property
    def used_bytes(self) -> int:
        return sum(size for _, size in self.rows)

    def table(self) -> tuple[tuple[str, int], ...]:
        """Rows to print: each part, what is used, the budget."""
        return (*self.rows, ("used", self.used_bytes), ("budget", self.budget_bytes))

    def check(self) -> None:
        """Raises:
        CapacityError: the parts exceed the budget; the message lists them.
        """
        if self.used_bytes > self.budget_bytes:
            parts = ", ".join(f"{name} {size}" for name, size in self.rows)
            raise CapacityError(
                f"{self.used_bytes} bytes are needed ({parts}) and {self.budget_bytes} are there; "
                "lower kv_cache_memory_bytes, max_num_seqs or max_num_batched_tokens"
            )


def weights_bytes(model: SplitModel) -> int:
    return sum(num_bytes(array) for array in model.params.values())


def kv_groups(model: SplitModel, page_size: int, kv_dtype: str) -> tuple[KVGroup, ...]:
    """Raises:
    ConfigError: the layers need more than one page table, which this runner does not keep.
    """
    groups = group_layers(tuple(model.kv_specs(page_size, kv_dtype)))
    if len(groups) != 1:
        raise ConfigError(f"the model's layers keep {len(groups)} kinds of KV pages; accepted: 1")
    return groups


def page_bytes(model: SplitModel, page_size: int, kv_dtype: str) -> int:
    """Bytes of one more page over all layers, as the attention implementation lays it out."""
    two, one = (sum(num_bytes(a) for a in model.kv_shapes(n, page_size, kv_dtype)) for n in (2, 1))
    return two - one


def logprob_bytes(num_rows: int, num_top: int) -> int:
    """Bytes of the log probabilities of so many rows: two numbers each for the token and for every top entry."""
    return num_rows * (2 + 2 * num_top + MAX_LOGPROB_TOKEN_IDS) * 4


def total_memory(device: Device, utilization: float, num_devices: int = 1) -> int:
    """Bytes that all of this may take on `device`: free memory on a CPU, else a share of the device's.

    `num_devices` devices on a CPU have its memory in common, equal shares each.

    Raises:
        ConfigError: the device does not tell its memory.
    """
    if device.platform == "cpu":
        return free_host_bytes() // num_devices
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if limit is None:
        raise ConfigError(
            f"{device.device_kind} does not tell its memory, so memory_utilization={utilization} means nothing "
            "there; accepted: kv_cache_memory_bytes or num_pages"
        )
    return int(limit * utilization)


def free_host_bytes() -> int:
    """Memory this process can still take: the machine's, or its control group's where that is less."""
    import psutil

    free = int(psutil.virtual_memory().available)
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        if limit != "max":
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            used = int((group / "memory.current").read_text()) - int(stat.get("inactive_file", 0))
            free = min(free, int(limit) - used)
    except (OSError, ValueError):
        pass  # no version 2 control group here: the machine's own number stands
    return max(free, 0)


def plan_pages(
    model: SplitModel,
    cache: CacheConfig,
    *,
    max_num_seqs: int,
    max_model_len: int,
    device: Device,
    budget_bytes: int,
    probe_temporaries: Callable[[], int],
) -> KVCachePlan:
    """How many KV pages there will be.

    `cache.num_pages` is taken as it is. Else the KV budget is `cache.memory_bytes`; on a CPU a
    quarter of `budget_bytes`, at most 2 GiB; on an accelerator what `budget_bytes` leaves beside
    the weights and `probe_temporaries()`.

    Raises:
        CapacityError: see `plan_kv`.
    """
    groups = kv_groups(model, cache.page_size, cache.dtype)
    if cache.num_pages is not None:
        return _fixed(groups, cache)
    is_given = cache.memory_bytes is not None
    if cache.memory_bytes is not None:
        kv_bytes = cache.memory_bytes
    elif device.platform == "cpu":
        kv_bytes = min(budget_bytes // CPU_KV_SHARE, CPU_MAX_KV_BYTES)
    else:
        kv_bytes = max(budget_bytes - weights_bytes(model) - probe_temporaries(), 0)
    needed = pages_for(max_model_len, cache.page_size) + 1
    num_pages = kv_bytes // page_bytes(model, cache.page_size, cache.dtype)
    if not is_given:
        num_pages = max(round_down(num_pages), min(num_pages, needed))
    num_pages = min(num_pages, max_num_seqs * (needed - 1) + 1)
    logical_page_bytes = KVCachePlan(groups, 1, cache.page_size).page_bytes
    return plan_kv(groups, num_pages * logical_page_bytes, max_model_len)


def _fixed(groups: tuple[KVGroup, ...], cache: CacheConfig) -> KVCachePlan:
    if cache.num_pages is None or cache.num_pages < 2:
        raise ConfigError(f"num_pages={cache.num_pages} is out of range; accepted: at least 2, one is the null page")
    return KVCachePlan(groups, cache.num_pages, cache.page_size)


def round_down(number: int, bits: int = SIGNIFICANT_BITS) -> int:
    """`number` with all but its first `bits` binary digits cleared."""
    shift = max(number.bit_length() - bits, 0)
    return number >> shift << shift
