"""Requests of public traces: the Azure LLM inference traces and BurstGPT, as CSV or as JSON lines."""

from __future__ import annotations

import copy
import csv
import json
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import numpy as np

from jaxllm.errors import ConfigError, shown
from jaxllm.sim.lengths import MAX_TOKENS
from jaxllm.sim.mix import Mix
from jaxllm.sim.workload import MAX_TIME_S, Arrival


@dataclass(frozen=True, slots=True)
class Columns:
    """Which columns of a trace hold what. Others are not read."""

    at: str
    prompt: str
    output: str
    texts: tuple[str, ...] = ()  # those that rows may be chosen by

    @property
    def names(self) -> tuple[str, ...]:
        return (self.at, self.prompt, self.output, *self.texts)


# https://github.com/Azure/AzurePublicDataset: AzureLLMInferenceDataset2023.md and ...2024.md
AZURE = Columns("TIMESTAMP", "ContextTokens", "GeneratedTokens")
# https://github.com/HPMLL/BurstGPT; release 2 has two columns more
BURSTGPT = Columns("Timestamp", "Request tokens", "Response tokens", ("Model", "Log Type"))


@dataclass(slots=True)
class TraceRows:
    """The requests of a trace in order of time; a row takes 16 bytes."""

    at_s: array[float] = field(default_factory=lambda: array("d"))  # the first is at 0
    num_prompt: array[int] = field(default_factory=lambda: array("i"))
    num_output: array[int] = field(default_factory=lambda: array("i"))
    num_left_out: int = 0  # rows without prompt or answer: requests that failed

    def __len__(self) -> int:
        return len(self.at_s)

    def sort(self) -> None:
        """By time, from 0 on; rows of one moment keep their order."""
        times = np.frombuffer(self.at_s, np.float64)
        order = np.argsort(times, kind="stable")
        self.at_s = array("d", (times - times[order[0]])[order].tobytes())
        for name in ("num_prompt", "num_output"):
            column = np.frombuffer(getattr(self, name), np.int32)
            setattr(self, name, array("i", column[order].tobytes()))


def read_trace(
    path: str | Path, columns: Columns, *, limit: int | None = None, only: Mapping[str, str] | None = None
) -> TraceRows:
    """The rows of a CSV file with a heading, or of a file `.jsonl` with an object of the same names a line.

    Rows without prompt or answer are left out, as BurstGPT's failed requests. Rows out of order are put
    in order.

    Args:
        limit: so many are read and no more.
        only: rows with these texts in these columns.

    Raises:
        ConfigError: the file cannot be read or lacks a column, a value is wrong, or no row is left.
    """
    path = Path(path).expanduser()
    rows, time, wanted = TraceRows(), _Time(), tuple((only or {}).items())
    try:
        for where, row in _json_rows(path, columns) if path.suffix == ".jsonl" else _csv_rows(path, columns):
            if any(row[name] != text for name, text in wanted):
                continue
            at_s = time.seconds(row[columns.at], where, columns.at)
            num_prompt, num_output = (_count(row[name], where, name) for name in (columns.prompt, columns.output))
            if not num_prompt or not num_output:
                rows.num_left_out += 1
                continue
            rows.at_s.append(at_s)
            rows.num_prompt.append(num_prompt)
            rows.num_output.append(num_output)
            if len(rows) == limit:
                break
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"trace {str(path)!r} cannot be read: {error}; accepted: a text file in UTF-8") from None
    if not rows:
        chosen = f" with {dict(wanted)}" if wanted else ""
        raise ConfigError(f"trace {str(path)!r} has no request{chosen} that was answered; accepted: at least one")
    rows.sort()
    return rows


class Replay:
    """Implements `Workload`: the requests of a trace, `speed` times as fast. Frozen: each start gives the same."""

    def __init__(self, rows: TraceRows, mix: Mix, *, speed: float = 1.0) -> None:
        self._rows = rows
        self._mix = mix
        self._speed = speed

    @property
    def num_left_out(self) -> int:
        """Rows of the file without prompt or answer."""
        return self._rows.num_left_out

    def start(self) -> Iterator[Arrival]:
        return _Replayed(self._rows, copy.deepcopy(self._mix), self._speed)

    def ended(self, arrival: Arrival, at_s: float, output_ids: Sequence[int]) -> Sequence[Arrival]:
        del arrival, at_s, output_ids
        return ()


class _Replayed:
    """The requests of a trace, picklable. Mutable."""

    def __init__(self, rows: TraceRows, mix: Mix, speed: float) -> None:
        self._rows = rows
        self._mix = mix
        self._speed = speed
        self._number = 0

    def __iter__(self) -> Iterator[Arrival]:
        return self

    def __next__(self) -> Arrival:
        number, rows = self._number, self._rows
        if number == len(rows):
            raise StopIteration
        self._number += 1
        at_s = rows.at_s[number] / self._speed
        return self._mix.sized(number, at_s, rows.num_prompt[number], rows.num_output[number])


_Row = tuple[str, Mapping[str, Any]]  # "file, line n", and the values by column


def _csv_rows(path: Path, columns: Columns) -> Iterator[_Row]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        lines = csv.reader(file)
        try:
            heading = [name.strip() for name in next(lines, [])]
            _check_heading(path, heading, columns)
            places = {name: heading.index(name) for name in columns.names}
            for cells in lines:
                if not cells:
                    continue
                where = f"trace {str(path)!r}, line {lines.line_num}"
                if len(cells) != len(heading):
                    raise ConfigError(f"{where}: {len(cells)} columns; accepted: {len(heading)}, as the heading has")
                yield where, {name: cells[place].strip() for name, place in places.items()}
        except csv.Error as error:
            raise ConfigError(f"trace {str(path)!r}, line {lines.line_num}: not CSV: {error}") from None


def _check_heading(path: Path, heading: Sequence[str], columns: Columns) -> None:
    twice = [name for name in columns.names if heading.count(name) > 1]
    if twice:
        raise ConfigError(f"trace {str(path)!r}, line 1: column {twice[0]!r} twice; accepted: each once")
    missing = [name for name in columns.names if name not in heading]
    if missing:
        raise ConfigError(
            f"trace {str(path)!r}, line 1: no column {missing[0]!r} in {shown(list(heading))}; "
            f"accepted: a heading with {', '.join(columns.names)}"
        )


def _json_rows(path: Path, columns: Columns) -> Iterator[_Row]:
    with path.open(encoding="utf-8-sig") as file:
        for where, row in json_objects(file, f"trace {str(path)!r}"):
            missing = [name for name in columns.names if name not in row]
            if missing:
                raise ConfigError(f"{where}: no {missing[0]!r} in {shown(row)}; accepted: {', '.join(columns.names)}")
            yield where, row


def json_objects(lines: Iterable[str], name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Objects, one a line, each with where it stands; empty lines are passed over.

    Raises:
        ConfigError: a line is something else.
    """
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        where = f"{name}, line {number}"
        try:
            value: Any = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{where}: not JSON: {error}; accepted: an object a line") from None
        if not isinstance(value, dict):
            raise ConfigError(f"{where}: {shown(value)}; accepted: an object")
        yield where, cast("dict[str, Any]", value)


def _count(value: Any, where: str, name: str) -> int:
    is_whole = isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 8
    number = int(value) if is_whole else value
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= MAX_TOKENS:
        accepted = f"a whole number of tokens, 0 to {MAX_TOKENS}"
        raise ConfigError(f"{where}: {name}={shown(value)}; accepted: {accepted}")
    return number


class _Time:
    """Reads moments: seconds, or dates, of which the first is 0. Mutable; of one file."""

    def __init__(self) -> None:
        self._first: datetime | None = None
        self._has_dates: bool | None = None  # None: no row was read yet

    def seconds(self, value: Any, where: str, name: str) -> float:
        number = _number(value)
        date = _date(value) if number is None else None
        if number is None and date is None:
            accepted = f"seconds, 0 to {MAX_TIME_S:g}, or a date and time as 2023-11-16 18:15:46.68"
            raise ConfigError(f"{where}: {name}={shown(value)}; accepted: {accepted}")
        if self._has_dates is None:
            self._has_dates, self._first = date is not None, date
        if self._has_dates != (date is not None):
            raise ConfigError(f"{where}: {name}={shown(value)}; accepted: what the rows before have, seconds or dates")
        if number is not None:
            return number
        assert date is not None and self._first is not None
        return (date - self._first).total_seconds()


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if 0 <= number <= MAX_TIME_S else None


def _date(value: Any) -> datetime | None:
    """Of text in ISO 8601; without a zone it is UTC."""
    try:
        date = datetime.fromisoformat(value)
    except (ValueError, TypeError):
        return None
    return date if date.tzinfo else date.replace(tzinfo=UTC)
