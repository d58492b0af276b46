"""From layers and bytes to pages: the KV memory plan."""

from __future__ import annotations

from dataclasses import dataclass

from jaxllm.errors import CapacityError
from jaxllm.memory.spec import KVCacheSpec


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share one spec, and so one page table."""

    layer_ids: tuple[int, ...]
    spec: KVCacheSpec


@dataclass(frozen=True, slots=True)
class KVCachePlan:
    """Pages to allocate once, before ready. Page 0 is the null page: padding writes go there."""

    groups: tuple[KVGroup, ...]
    num_pages: int  # per group, the null page included
    page_size: int

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers."""
        return sum(len(g.layer_ids) * g.spec.bytes_per_page for g in self.groups)

    @property
    def total_bytes(self) -> int:
        return self.num_pages * self.page_bytes

    @property
    def capacity_tokens(self) -> int:
        return (self.num_pages - 1) * self.page_size


def group_layers(specs: tuple[KVCacheSpec, ...]) -> tuple[KVGroup, ...]:
    """Group layers by equal spec, in order of first appearance. `specs` has one entry a layer."""
    by_spec: dict[KVCacheSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        by_spec.setdefault(spec, []).append(layer)
    return tuple(KVGroup(tuple(ids), spec) for spec, ids in by_spec.items())


def plan_kv(groups: tuple[KVGroup, ...], budget_bytes: int, max_model_len: int) -> KVCachePlan:
    """As many pages as `budget_bytes` holds.

    Raises:
        CapacityError: a request of `max_model_len` tokens would not fit; the message says what is
            needed, what there is, and the longest max_model_len that fits.
    """
    page_size = groups[0].spec.page_size
    per_page = KVCachePlan(groups, 1, page_size).page_bytes
    plan = KVCachePlan(groups, budget_bytes // per_page, page_size)
    needed = 1 + max(g.spec.max_pages(max_model_len) for g in groups)
    if plan.num_pages < needed:
        raise CapacityError(
            f"max_model_len={max_model_len} needs {needed * per_page} bytes of KV pages and the budget is "
            f"{budget_bytes}; the longest max_model_len that fits is {max(plan.capacity_tokens, 0)}"
        )
    return plan
