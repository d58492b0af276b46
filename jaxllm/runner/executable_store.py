"""Compiled programs kept on disk, so that a second start compiles nothing and seldom traces.

jax's own compilation cache is keyed by the lowered program, and making that takes most of a warm
start: 0.3 CPU-seconds a step program, against 0.06 to load the executable. Here a program is looked
up twice. First by what it is made from: every source file of both packages, the model, the shapes.
Then, if a source file changed, by its lowered text. Both keys hold the versions, settings, device
and instruction set that the compiler goes by. A file that does not load counts as absent. Loading
runs what a file holds, as with jax's cache, so the folder is the user's own.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import pickle
import platform
import re
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
from jax.experimental import serialize_executable
from jax.stages import Compiled, Lowered

import jaxllm
import pallas_kernels
from jaxllm.config.env import compiler_flags
from jaxllm.runner.kv_buffers import Device

if TYPE_CHECKING:
    from jaxllm.runner.step import ProgramSpec

_log = logging.getLogger(__name__)
_COMPILERS = ("jax", "jaxlib", "flax", "libtpu", "jax-cuda12-pjrt", "jax-cuda13-pjrt")
_UNUSED_S = 30 * 86400.0  # files that no start has loaded for so long are removed
_FORMAT = b"temporary bytes, executable, trees"  # of a kept file
_NO_EFFECT = re.compile(r"cache|log|dump|debug|traceback")  # settings that change no program


@dataclass(frozen=True, slots=True)
class Program:
    """A compiled program, and what its compiler said of it. Asking again costs 15 ms, so the answer is kept too."""

    call: Compiled
    temporary_bytes: int  # device memory beside arguments and results; 0 where the backend does not say

    @staticmethod
    def of(compiled: Compiled) -> Program:
        analysis: Any = compiled.memory_analysis()
        return Program(compiled, int(analysis.temp_size_in_bytes) if analysis is not None else 0)


class ExecutableStore:
    """Executables of one model on one device. `folder` None keeps nothing."""

    def __init__(self, folder: Path | None, device: Device, model: object) -> None:
        self._folder = _usable(folder)
        self._device = device
        if self._folder is not None:
            _remove_unused(self._folder)
            self._compiler = _digest(*_compiler(device))
            self._sources = _digest(repr(model).encode(), pallas_kernels.fingerprint().encode(), *_sources())

    def find(self, spec: ProgramSpec) -> Program | None:
        """The program of `spec` if it is kept and made from the sources of today: no tracing."""
        link = self._link(spec)
        if link is None or not link.exists():
            return None
        os.utime(link)  # used today
        return self._load(spec, link.read_text())

    def compile(self, spec: ProgramSpec, lowered: Lowered) -> Program:
        """The program of `spec`: kept from when it lowered to the same text, or compiled now and kept.

        jax's own cache must be off: an executable that came out of a cache does not serialise again
        (on CPUs it loses its functions, which shows when it is called).
        """
        link = self._link(spec)
        if link is None:
            return Program.of(lowered.compile())
        name = _digest(self._compiler.encode(), lowered.as_text().encode())
        program = self._load(spec, name)
        if program is None:
            program = Program.of(lowered.compile())
            self._save(spec, name, program)
        with contextlib.suppress(OSError):  # `_save` has told of a full disk
            _write(link, name.encode())
        return program

    def _link(self, spec: ProgramSpec) -> Path | None:
        if self._folder is None:
            return None
        shapes = [(a.shape, str(a.dtype)) for a in jax.tree.leaves(spec.arguments)]
        program = repr((self._compiler, self._sources, spec.name, shapes))
        return self._folder / f"{_digest(program.encode())}.program"

    def _load(self, spec: ProgramSpec, name: str) -> Program | None:
        assert self._folder is not None
        path = self._folder / f"{name}.executable"
        if not path.exists():
            return None
        try:
            os.utime(path)
            temporary_bytes, payload, in_tree, out_tree = pickle.loads(path.read_bytes())
            compiled = serialize_executable.deserialize_and_load(
                payload, in_tree, out_tree, backend=self._device.client, execution_devices=[self._device]
            )
            return Program(compiled, temporary_bytes)
        except Exception as error:  # whatever is wrong with a kept file, compiling makes it good
            _log.warning("%s in %s does not load (%s); compiling it again", spec.name, path, error)
            return None

    def _save(self, spec: ProgramSpec, name: str, program: Program) -> None:
        assert self._folder is not None
        try:
            kept = (program.temporary_bytes, *serialize_executable.serialize(program.call))
            _write(self._folder / f"{name}.executable", pickle.dumps(kept))
        except Exception as error:  # a full disk or a backend without serialisation costs time, not the start
            _log.warning("%s is not kept (%s); the next start compiles it again", spec.name, error)


def _usable(folder: Path | None) -> Path | None:
    """`folder`, made where it is missing; None, with a warning, where it cannot be written."""
    if folder is None:
        return None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        _log.warning(
            "compiled programs are not kept (%s); accepted for compilation_cache_dir: a writable folder", error
        )
        return None
    return folder


def _digest(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:40]


def _write(path: Path, data: bytes) -> None:
    """A file that appears whole or not at all."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(data)
    os.replace(file.name, path)


def _remove_unused(folder: Path) -> None:
    for path in folder.iterdir():
        try:
            if time.time() - path.stat().st_mtime > _UNUSED_S:
                path.unlink()
        except OSError:
            continue  # another start was quicker


def _compiler(device: Device) -> Iterator[bytes]:
    """All that the same lowered text may compile differently under, and the format of what is kept."""
    yield _FORMAT
    yield repr((device.platform, device.device_kind, device.id, device.client.platform_version)).encode()
    yield repr((platform.python_version(), platform.machine(), [_version(name) for name in _COMPILERS])).encode()
    settings: dict[str, Any] = jax.config.values
    yield repr(sorted((k, str(v)) for k, v in settings.items() if not _NO_EFFECT.search(k))).encode()
    yield repr(compiler_flags()).encode()
    if device.platform == "cpu":
        yield _instruction_set()


def _sources() -> Iterator[bytes]:
    for package in (jaxllm, pallas_kernels):
        root = Path(str(package.__file__)).parent
        for path in sorted(root.rglob("*.py")):
            yield str(path.relative_to(root)).encode()
            yield path.read_bytes()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _instruction_set() -> bytes:
    """What this machine's processor can execute, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor().encode()
    return "\n".join(sorted({line for line in lines if re.match(r"(flags|Features|model name)\s*:", line)})).encode()
