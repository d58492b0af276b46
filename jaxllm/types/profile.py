"""Where the time of a step went: one record a step, and what many of them say together."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

PHASES: tuple[str, ...] = (
    "schedule",
    "build",
    "dispatch",
    "device",
    "copy_back",
    "sample",
    "update",
    "detokenise",
    "send",
)


@dataclass(frozen=True, slots=True)
class StepProfile:
    """Seconds of one step by phase, all as the host sees them. Phases of different steps overlap.

    schedule    deciding who gets tokens
    build       packing the decision into arrays
    dispatch    handing the arrays to the device, which then works on its own
    device      the step had the device for itself: from its dispatch, or from the end of the step
                before if that was later, until its tokens were ready. A host that comes late to ask
                sees a longer time than the device took, so this is an upper bound
    sample      the part of `device` after the forward pass, where the executor can tell them apart;
                not counted in `device`, 0 where it cannot
    copy_back   from tokens that are ready to plain numbers on the host
    update      taking in the tokens: stops, pages, what is sent to the front end
    detokenise  making text, in the front end; counted in the step that was collected next
    send        writing replies, likewise
    """

    num_tokens: int  # computed in it
    num_requests: int
    is_decode: bool  # each request got one token, past its prompt
    wall_s: float  # from the end of the step before, or its own start if nothing ran, to its end on the host
    idle_s: float  # of the device before it: nothing was dispatched though a step was decided
    schedule_s: float
    build_s: float
    dispatch_s: float
    device_s: float
    copy_back_s: float
    sample_s: float
    update_s: float
    detokenise_s: float
    send_s: float

    @property
    def seconds(self) -> tuple[float, ...]:
        """In the order of `PHASES`."""
        return (
            self.schedule_s,
            self.build_s,
            self.dispatch_s,
            self.device_s,
            self.copy_back_s,
            self.sample_s,
            self.update_s,
            self.detokenise_s,
            self.send_s,
        )


@dataclass(frozen=True, slots=True)
class PhaseSummary:
    """One phase over many steps, in seconds."""

    name: str
    mean_s: float
    p50_s: float
    p99_s: float
    share: float  # of the wall time of all steps; phases overlap, so shares may add up to more than 1


@dataclass(frozen=True, slots=True)
class ProfileSummary:
    """Many steps together. Without steps all is 0."""

    count: int  # steps
    num_tokens: int
    wall_s: float
    busy_share: float  # of the wall time in which the device had work
    phases: tuple[PhaseSummary, ...]  # in the order of `PHASES`, then "wall" and "idle"

    @staticmethod
    def of(profiles: Sequence[StepProfile]) -> ProfileSummary:
        wall_s = sum(profile.wall_s for profile in profiles)
        steps = [(*profile.seconds, profile.wall_s, profile.idle_s) for profile in profiles]
        names = (*PHASES, "wall", "idle")
        busy_s = sum(profile.device_s + profile.sample_s for profile in profiles)
        return ProfileSummary(
            count=len(profiles),
            num_tokens=sum(profile.num_tokens for profile in profiles),
            wall_s=wall_s,
            busy_share=min(1.0, busy_s / wall_s) if wall_s else 0.0,
            phases=tuple(_phase(name, [step[i] for step in steps], wall_s) for i, name in enumerate(names)),
        )

    def rows(self) -> tuple[tuple[str, ...], ...]:
        """For a table, the heading first: milliseconds, and per cent of the wall time."""
        heading = ("phase", "mean ms", "p50 ms", "p99 ms", "share")
        return (heading, *(_row(phase) for phase in self.phases))

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "num_steps": self.count,
            "num_tokens": self.num_tokens,
            "wall_s": self.wall_s,
            "device_busy_share": self.busy_share,
            "phases": {
                phase.name: {
                    "mean_s": phase.mean_s,
                    "p50_s": phase.p50_s,
                    "p99_s": phase.p99_s,
                    "share": phase.share,
                }
                for phase in self.phases
            },
        }


class PhaseClock:
    """Seconds that the front end spent making text and sending it. Mutable.

    Written by the front end's one thread, read by the cores' threads: each second is taken once,
    by whichever core asks next.
    """

    def __init__(self) -> None:
        self.detokenise_s = 0.0  # totals since start; add to them
        self.send_s = 0.0
        self._taken = (0.0, 0.0)
        self._lock = threading.Lock()  # between readers

    def take(self) -> tuple[float, float]:
        """Seconds of both since anybody took them last: (detokenise, send)."""
        with self._lock:
            now = (self.detokenise_s, self.send_s)
            before, self._taken = self._taken, now
        return now[0] - before[0], now[1] - before[1]


def _phase(name: str, seconds: Iterable[float], wall_s: float) -> PhaseSummary:
    ordered = sorted(seconds)
    total = sum(ordered)
    return PhaseSummary(
        name,
        mean_s=total / len(ordered) if ordered else 0.0,
        p50_s=_percentile(ordered, 0.5),
        p99_s=_percentile(ordered, 0.99),
        share=total / wall_s if wall_s else 0.0,
    )


def _percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of all values does not exceed; 0 if there are none."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0


def _row(phase: PhaseSummary) -> tuple[str, ...]:
    milliseconds = (phase.mean_s * 1e3, phase.p50_s * 1e3, phase.p99_s * 1e3)
    return (phase.name, *(f"{value:.3f}" for value in milliseconds), f"{phase.share:.1%}")
