"""How long a step takes on a device that is not here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from jaxllm.types.step import ScheduledRows, SchedulerOutput


class CostModel(Protocol):
    """Predicts steps. Frozen: the same plan always takes the same time."""

    def step_seconds(self, plan: SchedulerOutput) -> float:
        """Seconds between the device starting on a step and its tokens being on the host."""
        ...


@dataclass(frozen=True, slots=True)
class KVLoaded:
    """A device that is handed the KV of prompts: only decodes cost what `cost` says, loading was waited for before."""

    cost: CostModel

    def step_seconds(self, plan: SchedulerOutput) -> float:
        rows, num = plan.rows, plan.rows.num_decode
        if num == 0:
            return 0.0
        decodes = ScheduledRows(
            rows.request_ids[:num], rows.slots[:num], rows.starts[:num], rows.num_tokens[:num], rows.samples[:num], num
        )
        return self.cost.step_seconds(replace(plan, rows=decodes))
