"""Results for people: columns under one another."""

from __future__ import annotations

from collections.abc import Sequence

Row = tuple[str, ...]


def table(rows: Sequence[Row], *, indent: str = "") -> str:
    """Rows as lines: the first column from the left, the others from the right where there are several."""
    if not rows:
        return ""
    num_columns = max(map(len, rows))
    filled = [(*row, *[""] * (num_columns - len(row))) for row in rows]
    widths = [max(len(row[i]) for row in filled) for i in range(num_columns)]
    return "\n".join(indent + _line(row, widths) for row in filled)


def _line(row: Row, widths: Sequence[int]) -> str:
    if len(row) == 2:
        return f"{row[0]:<{widths[0]}}  {row[1]}".rstrip()
    others = (f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))
    return "  ".join([f"{row[0]:<{widths[0]}}", *others]).rstrip()
