"""The size guard: files under 500 lines, functions under 60, kernel bodies under 150."""

from __future__ import annotations

import ast
import statistics
from collections.abc import Iterator
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
SOURCES = sorted([*REPO.glob("jaxllm/**/*.py"), *REPO.glob("pallas_kernels/**/*.py")])
KERNEL_FILES = {"tpu.py", "gpu.py", "xla.py"}
REFUSED_NAMES = {"utils", "util", "common", "helpers", "helper", "misc"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(path: Path) -> Iterator[Function]:
    tree = ast.parse(path.read_text())
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def num_lines(function: Function) -> int:
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1


def test_no_file_reaches_500_lines() -> None:
    sizes = {str(p.relative_to(REPO)): len(p.read_text().splitlines()) for p in SOURCES}
    assert sizes
    assert {name: n for name, n in sizes.items() if n >= 500} == {}


def test_no_function_is_too_long() -> None:
    too_long = [
        f"{path.relative_to(REPO)}:{f.lineno} {f.name} {num_lines(f)}"
        for path in SOURCES
        for f in functions(path)
        if num_lines(f) >= (150 if path.name in KERNEL_FILES else 60)
    ]
    assert too_long == []


def test_median_function_is_short() -> None:
    assert statistics.median(num_lines(f) for path in SOURCES for f in functions(path)) <= 10


def test_no_room_is_named_after_nothing() -> None:
    assert [p for p in SOURCES if p.stem in REFUSED_NAMES] == []
