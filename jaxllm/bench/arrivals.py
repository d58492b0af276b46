"""When requests are sent: a Poisson process, a burstier or more regular one, or a rate that rises."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Literal

RampUp = Literal["linear", "exponential"]


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Gaps between requests follow a gamma distribution of shape `burstiness` and mean 1 / rate.

    1 is a Poisson process, below it requests come in bursts, above it more evenly. With `ramp_up`
    the rate goes from `start_rate` to `rate` over the requests.
    """

    rate: float = math.inf  # requests a second
    burstiness: float = 1.0
    ramp_up: RampUp | None = None
    start_rate: float = 0.0

    def times(self, num_requests: int, seed: int) -> list[float]:
        """Seconds from the start at which each request is due; the first one at once."""
        draw = random.Random(seed)
        now_s, times = 0.0, [0.0] * min(1, num_requests)
        for index in range(1, num_requests):
            rate = self._rate_at(index / num_requests)
            if not math.isinf(rate):
                now_s += draw.gammavariate(self.burstiness, 1 / rate) / self.burstiness
            times.append(now_s)
        return times

    def _rate_at(self, share: float) -> float:
        """The rate after this share of all requests."""
        if self.ramp_up is None:
            return self.rate
        if self.ramp_up == "linear":
            return self.start_rate + (self.rate - self.start_rate) * share
        return self.start_rate * (self.rate / self.start_rate) ** share
