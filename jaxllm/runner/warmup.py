"""Have every program before ready: from the store of executables, else compiled in parallel threads."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.stages import Compiled

from jaxllm.layers.batch import Bucket
from jaxllm.runner.executable_store import ExecutableStore, Program
from jaxllm.runner.kv_buffers import Device
from jaxllm.runner.side_programs import SidePrograms
from jaxllm.runner.step import ProgramSpec, SampleVariant

MAX_THREADS = 4


@dataclass(frozen=True, slots=True)
class ProgramSpecs:
    """All programs of a Runner, by what picks them in the hot path."""

    forward: dict[Bucket, ProgramSpec]
    sample: dict[SampleVariant, ProgramSpec]
    side: SidePrograms[ProgramSpec]

    def __iter__(self) -> Iterator[ProgramSpec]:
        """Largest first, so that the pool of compiling threads ends evenly."""
        yield from sorted(self.forward.values(), key=lambda s: -s.arguments[-1].shape[0])
        yield from self.sample.values()
        yield from self.side


@dataclass(frozen=True, slots=True)
class Programs:
    """Compiled executables, called directly in the hot path: a wrong shape is an error, never a compilation."""

    forward: dict[Bucket, Compiled]
    sample: dict[SampleVariant, Compiled]
    side: SidePrograms[Compiled]
    temporary_bytes: dict[str, int]  # by program name, from the compiler

    @property
    def num_programs(self) -> int:
        return len(self.temporary_bytes)

    @property
    def largest_temporary_bytes(self) -> int:
        return max(self.temporary_bytes.values())


def compile_program(spec: ProgramSpec, device: Device, store: ExecutableStore) -> Program:
    """One program for one device: from `store`, or traced, lowered and compiled."""
    if not spec.is_kept:
        return Program.of(spec.trace(device).lower().compile())
    return store.find(spec) or store.compile(spec, spec.trace(device).lower())


def compile_all(
    specs: ProgramSpecs,
    device: Device,
    store: ExecutableStore,
    *,
    num_threads: int | None = None,
    progress: Callable[[int, int], None],
) -> Programs:
    """Every program of `specs`, compiled for `device`; `progress(done, total)` after each.

    An exception, of `progress` too, ends it early.
    """
    pending = list(specs)
    threads = num_threads or min(MAX_THREADS, max(2, os.cpu_count() or 1))
    compiled: dict[str, Program] = {}
    with ThreadPoolExecutor(threads, "jaxllm-compile") as pool:
        jobs = {pool.submit(compile_program, spec, device, store): spec.name for spec in pending}
        try:
            for job in as_completed(jobs):
                compiled[jobs[job]] = job.result()
                progress(len(compiled), len(pending))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)  # what has not begun need not
            raise
    return Programs(
        forward={bucket: compiled[spec.name].call for bucket, spec in specs.forward.items()},
        sample={variant: compiled[spec.name].call for variant, spec in specs.sample.items()},
        side=specs.side.map(lambda spec: compiled[spec.name].call),
        temporary_bytes={name: program.temporary_bytes for name, program in compiled.items()},
    )


def cache_folder(root: Path | None, device: Device, model: object) -> Path | None:
    """Where the store keeps programs: one folder per jax version, kind of device and model.

    `model` is anything whose repr tells models apart.

    None without a root, or where the user has set up jax's own compilation cache, which then serves.
    """
    config: Any = jax.config
    if root is None or config.jax_compilation_cache_dir:
        return None
    kind = re.sub(r"[^A-Za-z0-9]+", "-", device.device_kind).strip("-").lower() or device.platform
    digest = hashlib.sha256(repr(model).encode()).hexdigest()[:16]
    return root / f"jax-{jax.__version__}" / kind / digest
