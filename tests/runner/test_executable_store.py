from __future__ import annotations

import os
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.stages import Lowered

from jaxllm.runner import executable_store
from jaxllm.runner.executable_store import ExecutableStore, Program
from jaxllm.runner.step import ProgramSpec, int32
from jaxllm.runner.warmup import compile_program

DEVICE = jax.devices()[0]
INPUT = np.arange(3, dtype=np.int32)


def spec(factor: int = 2, size: int = 3) -> ProgramSpec:
    return ProgramSpec.of("times", lambda x: x * factor, (int32(size),), (0,))


def store(folder: Path | None, model: str = "model") -> ExecutableStore:
    return ExecutableStore(folder, DEVICE, model)


@pytest.fixture
def num_compiled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with each compilation."""
    compiled: list[int] = []
    real = Lowered.compile
    monkeypatch.setattr(Lowered, "compile", lambda self: compiled.append(1) or real(self))
    return compiled


def test_a_kept_program_is_found_without_tracing(tmp_path: Path, num_compiled: list[int]) -> None:
    compile_program(spec(), DEVICE, store(tmp_path))
    found = store(tmp_path).find(spec())
    assert found is not None
    assert found.call(INPUT).tolist() == [0, 2, 4]
    assert found.call.out_info.shape == (3,)
    assert found.temporary_bytes == Program.of(found.call).temporary_bytes
    assert len(num_compiled) == 1


def test_another_model_shape_or_compiler_setting_finds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_program(spec(), DEVICE, store(tmp_path))
    assert store(tmp_path, "another").find(spec()) is None
    assert store(tmp_path).find(spec(size=4)) is None
    monkeypatch.setattr(executable_store, "compiler_flags", lambda: ("--xla_cpu_enable_fast_math=true", ""))
    assert store(tmp_path).find(spec()) is None


def test_edited_sources_trace_again_but_compile_only_what_changed(
    tmp_path: Path, num_compiled: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_program(spec(), DEVICE, store(tmp_path))
    monkeypatch.setattr(executable_store, "_sources", lambda: iter([b"edited"]))
    assert store(tmp_path).find(spec()) is None
    assert compile_program(spec(), DEVICE, store(tmp_path)).call(INPUT).tolist() == [0, 2, 4]
    assert len(num_compiled) == 1
    monkeypatch.setattr(executable_store, "_sources", lambda: iter([b"edited again"]))
    assert compile_program(spec(factor=5), DEVICE, store(tmp_path)).call(INPUT).tolist() == [0, 5, 10]
    assert len(num_compiled) == 2


def test_a_file_that_does_not_load_is_compiled_and_kept_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, num_compiled: list[int]
) -> None:
    compile_program(spec(), DEVICE, store(tmp_path))
    (kept,) = tmp_path.glob("*.executable")
    kept.write_bytes(kept.read_bytes()[:100])
    assert compile_program(spec(), DEVICE, store(tmp_path)).call(INPUT).tolist() == [0, 2, 4]
    assert "does not load" in caplog.text
    assert store(tmp_path).find(spec()) is not None
    assert len(num_compiled) == 2


def test_files_that_no_start_loads_for_a_month_are_removed(tmp_path: Path) -> None:
    compile_program(spec(), DEVICE, store(tmp_path))
    for path in tmp_path.iterdir():
        os.utime(path, (0, 0))
    store(tmp_path)
    assert not list(tmp_path.iterdir())


def test_without_a_folder_nothing_is_kept(tmp_path: Path, num_compiled: list[int]) -> None:
    for _ in range(2):
        assert compile_program(spec(), DEVICE, store(None)).call(INPUT).tolist() == [0, 2, 4]
    assert len(num_compiled) == 2


def test_a_folder_that_cannot_be_written_costs_compilations_and_nothing_else(
    tmp_path: Path, num_compiled: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "inside"):
        assert compile_program(spec(), DEVICE, store(folder)).call(INPUT).tolist() == [0, 2, 4]
    assert len(num_compiled) == 2
    assert caplog.text.count("compiled programs are not kept") == 2
