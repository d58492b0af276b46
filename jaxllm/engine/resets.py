"""Resets of the prefix cache that wait for the cores' answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jaxllm.engine.messages import PrefixCacheReset, ResetPrefixCache

OnReset = Callable[[bool | Exception], None]  # whether every core has forgotten its pages


@dataclass(slots=True)
class _Asked:
    on_reset: OnReset
    num_waiting: int  # cores that have not answered
    is_done: bool = True


class Resets:
    """Mutable; owned by the front end. Each reset is answered once."""

    def __init__(self, num_cores: int) -> None:
        self._num_cores = num_cores
        self._serial = 0
        self._asked: dict[int, _Asked] = {}

    def __len__(self) -> int:
        return len(self._asked)

    def ask(self, on_reset: OnReset) -> ResetPrefixCache:
        """What every core is to be sent."""
        self._serial += 1
        self._asked[self._serial] = _Asked(on_reset, self._num_cores)
        return ResetPrefixCache(self._serial)

    def take_in(self, answer: PrefixCacheReset) -> None:
        asked = self._asked.get(answer.serial)
        if asked is None:  # failed meanwhile
            return
        asked.num_waiting -= 1
        asked.is_done &= answer.is_done
        if not asked.num_waiting:
            del self._asked[answer.serial]
            asked.on_reset(asked.is_done)

    def fail_all(self, error: Exception) -> None:
        """No more answers will come."""
        asked, self._asked = self._asked, {}
        for each in asked.values():
            each.on_reset(error)
