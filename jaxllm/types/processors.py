"""Logits processors of the caller's own, for the offline API."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MAX_PROCESSORS = 8  # room in a device row


@dataclass(frozen=True, slots=True)
class LogitsProcessor:
    """A pure function over logits, declared at start so that it is compiled before the first request.

        LLM(logits_processors=[LogitsProcessor("shift", lambda logits, by: logits + by[:, None])])
        SamplingParams(extra_args={"shift": 0.5})

    `apply` is traced by jax: (logits [N, V] float32, argument [N] float32) -> logits [N, V]. A row
    is changed only if its request names the processor in `extra_args`; the number there is its
    argument. Row n of the result may depend on row n alone. Processors run in the order of
    declaration, after masks and logit_bias, before penalties and temperature.
    """

    name: str
    apply: Callable[[Any, Any], Any]
