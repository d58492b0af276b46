"""How a request asks to be served, beside what it asks to be sampled."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jaxllm.errors import RequestError, shown

DEFAULT_RETENTION = 35
MAX_RETENTION = 100
_LONGEST_TENANT = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceParams:
    """Hints for the scheduler and the prefix cache. No field changes which tokens come.

    Raises:
        RequestError: a value has the wrong type or is out of range; the message names the field.
    """

    tenant: str | None = None  # who pays: fair policies share between tenants
    deadline_s: float | None = None  # seconds after arrival at which it ends, whatever it has
    retention_priority: int = DEFAULT_RETENTION  # 0..100: cached pages of low priority are evicted first
    retention_tokens: int | None = None  # first tokens that the priority is for; None: all
    ttft_target_s: float | None = None  # seconds from arrival to the first token
    tpot_target_s: float | None = None  # seconds a token after the first
    predicted_tokens: int | None = None  # output tokens that are expected

    def __post_init__(self) -> None:
        for name in ("deadline_s", "ttft_target_s", "tpot_target_s"):
            _check_seconds(name, getattr(self, name))
        for name in ("retention_tokens", "predicted_tokens"):
            value = getattr(self, name)
            if value is not None and not (_is_int(value) and 0 <= value < 2**31):
                raise RequestError(f"{name}={shown(value)}; accepted: a whole number of tokens, at least 0", param=name)
        if not _is_int(self.retention_priority) or not 0 <= self.retention_priority <= MAX_RETENTION:
            accepted = f"a whole number from 0 to {MAX_RETENTION}"
            raise RequestError(
                f"retention_priority={shown(self.retention_priority)}; accepted: {accepted}", param="retention_priority"
            )
        if self.tenant is not None and not _is_name(self.tenant):
            accepted = f"a string of 1 to {_LONGEST_TENANT} characters"
            raise RequestError(f"tenant={shown(self.tenant)}; accepted: {accepted}", param="tenant")


def _check_seconds(name: str, value: object) -> None:
    if value is None:
        return
    if not isinstance(value, int | float) or isinstance(value, bool) or not (math.isfinite(value) and value > 0):
        raise RequestError(f"{name}={shown(value)}; accepted: seconds, above 0", param=name)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_name(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= _LONGEST_TENANT


DEFAULT_SERVICE = ServiceParams()
