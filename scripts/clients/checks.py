"""What the client scripts share: checks with names, one line each, and comparisons that say what differed.

Standard library only: each script runs in an environment that holds its client and nothing of ours.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

Check = Callable[[], Any]
_checks: list[tuple[str, Check]] = []


@dataclass(frozen=True)
class Server:
    """Where a server of ours listens, and what it wants to be asked with."""

    url: str  # without /v1
    key: str
    model: str

    @property
    def v1(self) -> str:
        return self.url + "/v1"


@dataclass(frozen=True)
class Servers:
    model: Server  # the default model in float32; needs its key
    scripted: Server  # exact answers to known prompts
    busy: Server  # room for one sequence, which never ends


def servers() -> Servers:
    """From the first argument, a JSON object."""
    given = json.loads(sys.argv[1])
    return Servers(**{name: Server(**fields) for name, fields in given.items()})


def check(name: str) -> Callable[[Check], Check]:
    """Put a function, plain or async, on the list; it fails by raising."""

    def register(run: Check) -> Check:
        _checks.append((name, run))
        return run

    return register


def run_checks() -> int:
    """Run all in order. Exit code: 0 if every one passed and there was one."""
    failed = 0
    for name, run in _checks:
        start = time.monotonic()
        try:
            result = run()
            if inspect.isawaitable(result):
                asyncio.run(_awaited(result))
        except Exception as error:
            failed += 1
            print(f"FAIL {name}: {_told(error)}", flush=True)
        else:
            print(f"ok   {name} ({time.monotonic() - start:.1f} s)", flush=True)
    return 1 if failed or not _checks else 0


async def _awaited(result: Any) -> Any:
    return await result


def _told(error: Exception) -> str:
    """Kind, text, and the line of the script that it came from."""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if "client_" in frame.filename]
    where = f" (line {own[-1].lineno}: {own[-1].line})" if own else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:600]}{where}"


def equal(found: Any, wanted: Any, what: str = "") -> None:
    if found != wanted:
        raise AssertionError(f"{what or 'it'} is {found!r}, wanted {wanted!r}")


def near(found: float, wanted: float, within: float, what: str = "") -> None:
    if not abs(found - wanted) <= within:
        raise AssertionError(f"{what or 'it'} is {found!r}, wanted {wanted!r} within {within}")


def true(condition: Any, what: str) -> None:
    if not condition:
        raise AssertionError(f"not so: {what}")


@contextmanager
def raises(*kinds: type[BaseException]) -> Iterator[SimpleNamespace]:
    """The block must raise one of `kinds`; afterwards `.error` of the result holds it."""
    caught = SimpleNamespace(error=None)
    try:
        yield caught
    except kinds as error:
        caught.error = error
        return
    raise AssertionError(f"nothing was raised, wanted {' or '.join(kind.__name__ for kind in kinds)}")


def until(accepted: Callable[[], bool], timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not accepted():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s} s: {what}")
        time.sleep(0.05)
