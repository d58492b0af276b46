"""Stands between the scheduler and a policy that may be wrong."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar, cast

from jaxllm.scheduler.policies.fcfs import FirstComeFirstServed
from jaxllm.scheduler.policy import PreemptivePolicy, SchedulerView, SchedulingPolicy
from jaxllm.types.request import Request, RequestStatus

_log = logging.getLogger("jaxllm.scheduler")
T = TypeVar("T")


class PolicyFault(Exception):
    """A policy answered nonsense."""


class PolicyTimeout(BaseException):
    """A policy works on a question for too long. Raised inside it; not an Exception, so that it is not caught there."""


class GuardedPolicy:
    """Asks a policy, checks what it answers, and asks fcfs for the rest of a step in which it was wrong.

    Wrong is: an exception, an answer of another type or about a request that is not to choose from, an
    order that does not end. Each fault counts; one of a new kind is logged. With `limit_s` a question
    that takes longer is broken off too, from another thread; work inside one call of C code cannot be.
    A policy must not change a request: that is not looked for.

    Mutable; owned by the scheduler.
    """

    def __init__(self, policy: SchedulingPolicy, *, limit_s: float | None = None) -> None:
        self.num_faults = 0
        self.is_preemptive = isinstance(policy, PreemptivePolicy)
        self.name = type(policy).__name__
        self._policy = policy
        self._fallback = FirstComeFirstServed()
        self._is_faulty = False  # since the step began
        self._known_faults: set[str] = set()
        self._watch = None if limit_s is None else _Watch(limit_s)

    def token_budget(self, view: SchedulerView) -> int:
        """The first question of each step."""
        self._is_faulty = False
        budget = self._ask("token_budget", lambda: _checked_budget(self._policy.token_budget(view)))
        return self._fallback.token_budget(view) if budget is None else budget

    def order(self, view: SchedulerView) -> Iterable[Request]:
        """Each waiting request at most once; after a fault, all that were not given yet as fcfs has them."""
        given: set[Request] = set()
        for request in self._own_order(view):
            if request not in given:
                given.add(request)
                yield request
        if self._is_faulty:
            yield from (request for request in self._fallback.order(view) if request not in given)

    def _own_order(self, view: SchedulerView) -> Iterator[Request]:
        """What the policy gives, until its end or a fault."""
        num_most = 2 * len(view.waiting) + 16
        source: Iterator[object] = self._ask("order", lambda: iter(self._policy.order(view))) or iter(())
        for _ in range(num_most):
            request = self._ask("order", lambda: _checked_waiting(next(source, _END), view))
            if request is None:
                return
            yield request
        self._note("order", PolicyFault(f"it does not end after {num_most} requests"))

    def admit(self, request: Request, view: SchedulerView) -> bool:
        answer = self._ask("admit", lambda: _checked_bool(self._policy.admit(request, view)))
        return self._fallback.admit(request, view) if answer is None else answer

    def victim(self, view: SchedulerView, needing: Request) -> Request:
        victim = self._ask("victim", lambda: _checked_victim(self._policy.victim(view, needing), view))
        return self._fallback.victim(view, needing) if victim is None else victim

    def preempt(self, candidate: Request, view: SchedulerView) -> Request | None:
        if not self.is_preemptive or not view.running:
            return None
        policy = cast("PreemptivePolicy", self._policy)
        found = self._ask("preempt", lambda: (_checked_preempted(policy.preempt(candidate, view), view),))
        return found[0] if found else None

    def _ask(self, question: str, ask: Callable[[], T]) -> T | None:
        """The answer; None after a fault, in this question or earlier in the step."""
        if self._is_faulty:
            return None
        try:
            return ask() if self._watch is None else self._watch.limited(ask)
        except (Exception, SystemExit, PolicyTimeout) as error:
            self._note(question, error)
            return None

    def _note(self, question: str, error: BaseException) -> None:
        self.num_faults += 1
        self._is_faulty = True
        kind = f"{question}: {type(error).__name__}"
        if kind not in self._known_faults:
            self._known_faults.add(kind)
            _log.error(
                "policy %s failed at %s (%s: %s); fcfs decides for the rest of this step, and of others like it",
                *(self.name, question, type(error).__name__, error),
            )


_END = object()


def _checked_waiting(request: object, view: SchedulerView) -> Request | None:
    """None at the end of the order."""
    if request is _END:
        return None
    if not isinstance(request, Request) or request not in view.waiting:
        raise PolicyFault(f"{getattr(request, 'request_id', request)!r:.80} is not a waiting request")
    return request


def _checked_budget(budget: Any) -> int:
    if not isinstance(budget, int) or isinstance(budget, bool):
        raise PolicyFault(f"a budget of {budget!r:.80}; accepted: a whole number of tokens")
    if budget < 0:
        raise PolicyFault(f"a budget of {budget} tokens; accepted: 0 or more")
    return budget


def _checked_bool(answer: Any) -> bool:
    if not isinstance(answer, bool):
        raise PolicyFault(f"{answer!r:.80}; accepted: True or False")
    return answer


def _checked_victim(victim: Any, view: SchedulerView) -> Request:
    is_running = isinstance(victim, Request) and victim.status is RequestStatus.RUNNING and victim in view.running
    if not is_running:
        raise PolicyFault(
            f"victim {getattr(victim, 'request_id', victim)!r:.80}; accepted: one of the running requests"
        )
    return victim


def _checked_preempted(victim: Any, view: SchedulerView) -> Request | None:
    return None if victim is None else _checked_victim(victim, view)


class _Watch:
    """Breaks off what takes too long, by an exception that another thread sets. Mutable; one asking thread."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._asking: tuple[int, float] | None = None  # thread, since when
        self._is_broken_off = False
        self._thread: threading.Thread | None = None

    def limited(self, ask: Callable[[], T]) -> T:
        """Raises: PolicyTimeout: it took longer than the limit."""
        if self._thread is None:
            arguments = (weakref.ref(self), self._limit_s / 4)
            self._thread = threading.Thread(target=_look_after, args=arguments, name="jaxllm-policy-watch", daemon=True)
            self._thread.start()
        asking = threading.get_ident()
        with self._lock:
            self._asking, self._is_broken_off = (asking, time.monotonic()), False
        try:
            answer = ask()
        finally:
            with self._lock:  # from here on nothing is set any more, and what was set before must not come later
                self._asking = None
            if self._is_broken_off:
                _let_it_come()
        if self._is_broken_off:  # the policy caught it, or was done at that moment
            raise PolicyTimeout
        return answer

    def look(self) -> None:
        """Called by the other thread now and then."""
        with self._lock:
            asking = self._asking
            if asking is None or self._is_broken_off or time.monotonic() - asking[1] < self._limit_s:
                return
            self._is_broken_off = True
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(asking[0]), ctypes.py_object(PolicyTimeout))


def _let_it_come() -> None:
    """Takes an exception that was set and has not come yet. To unset it instead would leave CPython 3.11 looking for
    one for ever, which under a profiler is a loop without end."""
    with contextlib.suppress(PolicyTimeout):
        for _ in range(100):  # the interpreter looks at each jump back
            pass


def _look_after(reference: weakref.ref[_Watch], every_s: float) -> None:
    """Until the watch is gone."""
    while (watch := reference()) is not None:
        watch.look()
        del watch
        time.sleep(every_s)
