"""Start-up: phases, cold and warm compilation, and what its programs promise about memory."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxllm.errors import CapacityError
from jaxllm.runner.runner import Runner
from jaxllm.runner.start import StartOptions, empty_step
from jaxllm.runner.warmup import cache_folder
from tests.runner.drive import Piece, Planner, run, start_oracle
from tests.runner.oracle_model import greedy_continuation

SMALL = {"max_num_seqs": 2, "max_num_batched_tokens": 16}
UNSEEN = {
    "max_num_seqs": 1,
    "max_num_batched_tokens": 4,
    "max_model_len": 52,
}  # shapes of no other test, which jax would remember


def test_a_second_start_reads_every_program_from_the_cache(tmp_path: Path) -> None:
    phases: list[str] = []
    progress: list[tuple[str, int, int]] = []
    threads: dict[str, int] = {}

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        threads[name] = threading.get_ident()
        phases.append(name)
        yield
        phases.append(f"{name} done")

    options = StartOptions(cache_dir=tmp_path, phase=phase, progress=lambda *seen: progress.append(seen))
    first = start_oracle(**UNSEEN, options=options)
    num_programs = first.stats().num_programs
    files = set(tmp_path.rglob("*.executable"))
    assert len(files) >= num_programs
    assert progress == [("compile", done + 1, num_programs) for done in range(num_programs)]
    assert {"plan", "weights", "compile", "allocate"} == {p.removesuffix(" done") for p in phases}
    assert phases[:2] == ["plan", "plan done"]
    assert phases[-2:] == ["allocate", "allocate done"]
    assert threads["weights"] != threads["compile"], "weights are read while programs compile"
    second = start_oracle(**UNSEEN, options=options)
    assert set(tmp_path.rglob("*.executable")) == files
    planner = Planner()
    plan = planner.plan([Piece("a", 0, 0, 3)], [planner.new("a", 0, [5, 6, 7])], {0: [1]})
    assert run(first, plan) == run(second, plan) == {"a": tuple(greedy_continuation([5, 6, 7], 1))}
    first.close()
    second.close()


def test_the_cache_tells_models_devices_and_versions_apart(tmp_path: Path) -> None:
    device = jax.devices()[0]
    folder = cache_folder(tmp_path, device, ("model", "float32"))
    assert folder == cache_folder(tmp_path, device, ("model", "float32"))
    assert folder != cache_folder(tmp_path, device, ("model", "bfloat16"))
    assert folder is not None
    assert folder.relative_to(tmp_path).parts[:2] == (f"jax-{jax.__version__}", "cpu")


def test_a_compilation_cache_that_the_user_has_set_up_serves_instead(tmp_path: Path) -> None:
    device = jax.devices()[0]
    assert cache_folder(None, device, "model") is None
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "theirs"))
    try:
        assert cache_folder(tmp_path, device, "model") is None
    finally:
        jax.config.update("jax_compilation_cache_dir", None)


def test_memory_that_is_not_there_is_refused_before_weights_and_programs() -> None:
    with pytest.raises(CapacityError, match="longest max_model_len that fits is 0"):
        start_oracle(num_pages=None, memory_bytes=64, max_model_len=64)


def test_an_error_in_loading_weights_reaches_the_caller(compile_cache: Path) -> None:
    def load() -> dict[str, jax.Array]:
        raise CapacityError("no such weights")

    compiled: list[int] = []
    options = StartOptions(cache_dir=compile_cache, progress=lambda phase, done, total: compiled.append(done))
    with pytest.raises(CapacityError, match="no such weights"):
        start_oracle(**SMALL, load=load, options=options)
    assert not compiled, "nothing more is compiled for weights that do not come"


def test_steps_of_padding_alone_change_nothing(runner: Runner) -> None:
    kv = np.asarray(runner._state.kv[0]).copy()
    assert run(runner, empty_step(0)) == {}
    assert np.array_equal(np.asarray(runner._state.kv[0])[:, 1:], kv[:, 1:])


def test_every_program_updates_pages_in_place(runner: Runner) -> None:
    kv_bytes = sum(a.nbytes for a in runner._state.kv)
    shape = ",".join(map(str, runner._state.kv[0].shape))
    for program in runner._programs.forward.values():
        assert program.memory_analysis().alias_size_in_bytes >= kv_bytes + runner._state.page_table.nbytes
        copies = re.findall(rf"= f32\[{shape}\]\S* copy\(", program.as_text())
        assert not copies
    history = runner._state.history
    written, shape = runner._state.last_tokens.nbytes + history.nbytes, ",".join(map(str, history.shape))
    for program in runner._programs.sample.values():
        assert program.memory_analysis().alias_size_in_bytes >= written
        assert not re.findall(rf"= s32\[{shape}\]\S* copy\(", program.as_text())
    side = runner._programs.side
    assert side.set_pages.memory_analysis().alias_size_in_bytes >= runner._state.page_table.nbytes
    assert side.copy_pages.memory_analysis().alias_size_in_bytes >= kv_bytes
    table_bytes = sum(a.nbytes for a in jax.tree.leaves(runner._state.tables))
    assert side.set_tables.memory_analysis().alias_size_in_bytes >= table_bytes
    assert side.set_history.memory_analysis().alias_size_in_bytes >= history.nbytes


def test_a_step_sends_one_array_and_waits_once(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted where they happen, and compared with what the Runner says of itself."""
    sent: list[tuple[int, ...]] = []

    def counted(program: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object) -> object:
            sent.extend(a.shape for a in jax.tree.leaves(arguments) if isinstance(a, np.ndarray))
            return program(*arguments)

        return call

    programs = runner._programs
    monkeypatch.setattr(
        runner,
        "_programs",
        replace(
            programs,
            forward={k: counted(v) for k, v in programs.forward.items()},
            sample={k: counted(v) for k, v in programs.sample.items()},
            side=programs.side.map(counted),
        ),
    )
    planner, before = Planner(), runner.stats()
    plans = [planner.plan([Piece("a", 0, 0, 6)], [planner.new("a", 0, range(6))], {0: [3, 1, 2]})]
    plans += [planner.plan([Piece("a", 0, 6 + i, 1)]) for i in range(4)]
    with jax.transfer_guard_device_to_host("disallow_explicit"):
        tickets = [runner.submit(p) for p in plans]
    for ticket in tickets:
        runner.collect(ticket)
    after = runner.stats()
    assert len(sent) == len(plans)
    assert after.num_host_to_device - before.num_host_to_device == len(plans)
    assert after.num_syncs - before.num_syncs == len(plans)
    assert after.num_steps - before.num_steps == len(plans)


def test_the_runner_counts_its_programs_and_their_temporaries(runner: Runner) -> None:
    stats = runner.stats()
    assert stats.num_forward_programs == len(runner.buckets.forward)
    assert stats.num_sample_programs == 3 * len(runner.buckets.sample_sizes)
    assert stats.num_programs == len(stats.temporary_bytes)
    largest = dict(runner.memory.table())["largest temporary"]
    assert largest == max(stats.temporary_bytes.values()) > 0


def test_a_shape_that_was_not_warmed_up_is_an_error_not_a_compilation(runner: Runner) -> None:
    program = runner._programs.side.set_pages
    with pytest.raises(TypeError, match=r"shape|type"):
        program(runner._state.page_table, np.zeros((3, 5), np.int32))


def test_a_compilation_in_a_step_is_counted(
    start: Callable[..., Runner], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The guard's own proof: a program that jits when it is called is found out."""
    runner = start()
    planner = Planner()
    real = runner._programs.forward.copy()

    def careless(*arguments: object) -> object:
        jax.jit(lambda x: x + 37)(np.arange(41, dtype=np.int32))
        return real[runner.buckets.choose(2, 1)](*arguments)

    runner._programs.forward[runner.buckets.choose(2, 1)] = careless
    run(runner, planner.plan([Piece("a", 0, 0, 2)], [planner.new("a", 0, [1, 2])], {0: [1]}))
    assert runner.compilations_after_ready == runner.stats().compilations_after_ready == 1
    assert any(r.levelno == logging.ERROR for r in caplog.records)
    runner.close()
