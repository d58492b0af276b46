"""Every error that pallas_kernels raises on purpose.

KernelError
├── InvalidArgument         an argument has the wrong shape, dtype or value (also a ValueError)
├── UnknownImplementation   `implementation=` names none that the op has (also a ValueError)
└── Unsupported             sound arguments that no implementation tried here serves
"""

from __future__ import annotations

from collections.abc import Mapping


class KernelError(Exception):
    """Root of the tree."""


class InvalidArgument(KernelError, ValueError):
    """An argument is wrong whatever the implementation. Raised while tracing, never on the device."""

    def __init__(self, argument: str, got: object, accepted: str) -> None:
        super().__init__(f"{argument}: got {got}; accepted: {accepted}")
        self.argument = argument


class UnknownImplementation(KernelError, ValueError):
    """`implementation=` names none that the op has; the message lists those it has."""

    def __init__(self, op: str, name: str, known: tuple[str, ...]) -> None:
        super().__init__(f"{op}: no implementation is called {name!r}; there are: {', '.join(known)}")


class Unsupported(KernelError):
    """No implementation that was tried serves the call. `reasons` has one entry for each."""

    def __init__(self, op: str, reasons: Mapping[str, str]) -> None:
        lines = "".join(f"\n  {name}: {reason}" for name, reason in reasons.items())
        super().__init__(f"{op}: no implementation serves this call{lines}")
        self.op = op
        self.reasons = dict(reasons)
