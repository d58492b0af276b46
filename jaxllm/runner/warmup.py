"""Compile every program before ready: in parallel threads, through the persistent compilation cache."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache
from jax.stages import Compiled

from jaxllm.layers.batch import Bucket
from jaxllm.runner.kv_buffers import Device
from jaxllm.runner.step import ProgramSpec, ProgramSpecs, SampleKey

MAX_THREADS = 4
_CACHE_SETTINGS = {
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}


@dataclass(frozen=True, slots=True)
class Programs:
    """Compiled executables, called directly in the hot path: a wrong shape is an error, never a compilation."""

    forward: dict[Bucket, Compiled]
    sample: dict[SampleKey, Compiled]
    set_pages: Compiled
    temporary_bytes: dict[str, int]  # by program name, from the compiler

    @property
    def num_programs(self) -> int:
        return len(self.forward) + len(self.sample) + 1

    @property
    def largest_temporary_bytes(self) -> int:
        return max(self.temporary_bytes.values())


def compile_program(spec: ProgramSpec, device: Device) -> Compiled:
    """Trace, lower and compile one program for one device."""
    return spec.trace(device).lower().compile()


def compile_all(
    specs: ProgramSpecs,
    device: Device,
    *,
    num_threads: int | None = None,
    progress: Callable[[int, int], None],
) -> Programs:
    """Every program of `specs`, compiled for `device`; `progress(done, total)` after each.

    An exception, of `progress` too, ends it early.
    """
    pending = list(specs)
    threads = num_threads or min(MAX_THREADS, max(2, os.cpu_count() or 1))
    compiled: dict[str, Compiled] = {}
    with ThreadPoolExecutor(threads, "jaxllm-compile") as pool:
        jobs = {pool.submit(compile_program, spec, device): spec.name for spec in pending}
        try:
            for job in as_completed(jobs):
                compiled[jobs[job]] = job.result()
                progress(len(compiled), len(pending))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)  # what has not begun need not
            raise
    return Programs(
        forward={bucket: compiled[spec.name] for bucket, spec in specs.forward.items()},
        sample={key: compiled[spec.name] for key, spec in specs.sample.items()},
        set_pages=compiled[specs.set_pages.name],
        temporary_bytes={name: temporary_bytes(program) for name, program in compiled.items()},
    )


def temporary_bytes(program: Compiled) -> int:
    """Device memory that `program` needs beside its arguments and results; 0 where the backend does not say."""
    analysis: Any = program.memory_analysis()
    return int(analysis.temp_size_in_bytes) if analysis is not None else 0


def cache_folder(root: Path, device: Device, model: object) -> Path:
    """One folder per jax version, kind of device and model (`model`: anything whose repr tells models apart)."""
    kind = re.sub(r"[^A-Za-z0-9]+", "-", device.device_kind).strip("-").lower() or device.platform
    digest = hashlib.sha256(repr(model).encode()).hexdigest()[:16]
    return root / f"jax-{jax.__version__}" / kind / digest


@contextmanager
def persistent_cache(folder: Path | None) -> Iterator[None]:
    """Compile through `folder` inside the block. A cache that the process already has stays in force."""
    config: Any = jax.config
    if folder is None or config.jax_compilation_cache_dir:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    before = {name: getattr(config, name) for name in _CACHE_SETTINGS}
    _configure({**_CACHE_SETTINGS, "jax_compilation_cache_dir": str(folder)}.items())
    try:
        yield
    finally:
        _configure({**before, "jax_compilation_cache_dir": None}.items())


def _configure(settings: Iterable[tuple[str, Any]]) -> None:
    for name, value in settings:
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # it would keep the folder it was first used with
