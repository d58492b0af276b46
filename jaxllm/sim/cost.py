"""How long a step takes on a device that is not here."""

from __future__ import annotations

from typing import Protocol

from jaxllm.types.step import SchedulerOutput


class CostModel(Protocol):
    """Predicts steps. Frozen: the same plan always takes the same time."""

    def step_seconds(self, plan: SchedulerOutput) -> float:
        """Seconds between the device starting on a step and its tokens being on the host."""
        ...
