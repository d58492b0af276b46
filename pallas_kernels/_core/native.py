"""The C++ kernels for CPUs: built once with the machine's own compiler, found again by what they were made from.

They are optional. Where there is no compiler the portable implementations serve, and `why_not` says why.

    CXX                       the compiler; default: the first of g++, clang++, c++ that is there
    PALLAS_KERNELS_CACHE_DIR  where built libraries are kept; default ~/.cache/pallas_kernels
    PALLAS_KERNELS_NATIVE     0: do as if there was no compiler
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path

import jax

from pallas_kernels._core.platform import default_platform

SOURCES = Path(__file__).parent.parent / "_native"
_COMPILERS = ("g++", "clang++", "c++")
# Not -ffast-math: sums keep the order that the source states. Contraction is what makes fused multiply-adds.
_FLAGS = ("-O3", "-march=native", "-std=gnu++17", "-ffp-contract=fast", "-fPIC", "-shared", "-DNDEBUG", "-w")
_TARGETS = {"attention": "NativeAttention", "matmul": "NativeMatmul"}
_TIMEOUT_S = 300


@dataclass(frozen=True, slots=True)
class Native:
    """The state of the native kernels in this process: targets to call, or the reason why there are none."""

    targets: Mapping[str, str]  # the name of each registered FFI target
    digest: str  # of everything the library was made from
    why_not: str | None = None


def why_not() -> str | None:
    """The reason the native kernels cannot serve here, or None. Builds them at the first call."""
    return native().why_not


def fingerprint() -> str:
    """What tells programs that call these kernels from others; on other platforms than CPUs always the same.

    Ask before a compiled program is loaded: that is what makes its targets known to this process.
    """
    if default_platform() != "cpu":
        return "none"
    state = native()
    return state.digest if state.why_not is None else "none"


@cache
def native() -> Native:
    """Build what is not built, load it and register it. One answer for the process."""
    if os.environ.get("PALLAS_KERNELS_NATIVE", "").strip() == "0":
        return Native({}, "", "PALLAS_KERNELS_NATIVE=0 turns it off")
    compiler = _compiler()
    if compiler is None:
        return Native({}, "", f"no C++ compiler found; looked for {os.environ.get('CXX') or ', '.join(_COMPILERS)}")
    digest = _digest(compiler)
    try:
        library = _library(compiler, digest)
    except (OSError, subprocess.SubprocessError) as error:
        return Native({}, "", f"{compiler} does not build it: {_reason(error)}")
    return Native(_register(library, digest), digest)


def _register(library: ctypes.CDLL, digest: str) -> dict[str, str]:
    """The digest is part of the names: a stored program that wants another build must not find this one."""
    names = {kernel: f"pallas_kernels.{kernel}.{digest[:12]}" for kernel in _TARGETS}
    for kernel, symbol in _TARGETS.items():
        jax.ffi.register_ffi_target(names[kernel], jax.ffi.pycapsule(getattr(library, symbol)), platform="cpu")
    return names


def _compiler() -> str | None:
    wanted = os.environ.get("CXX")
    return next((found for name in ((wanted,) if wanted else _COMPILERS) if (found := shutil.which(name))), None)


def _digest(compiler: str) -> str:
    stat = Path(compiler).resolve().stat()
    parts = [version("jaxlib"), compiler, str(stat.st_size), str(stat.st_mtime_ns), *_FLAGS, _instruction_set()]
    digest = hashlib.sha256("\0".join(parts).encode())
    for path in sorted(SOURCES.iterdir()):
        if path.suffix in (".h", ".cc"):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _instruction_set() -> str:
    """A home folder may be shared by machines that do not run each other's code."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() + platform.machine()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())


def _library(compiler: str, digest: str) -> ctypes.CDLL:
    folder = Path(os.environ.get("PALLAS_KERNELS_CACHE_DIR") or "~/.cache/pallas_kernels").expanduser()
    path = folder / f"native-{digest[:24]}.so"
    try:
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            _build(compiler, path)
        return ctypes.CDLL(str(path))
    except OSError:  # a folder that is read-only, full, or may not hold programs: for this process alone
        with tempfile.TemporaryDirectory(prefix="pallas_kernels-") as own:
            _build(compiler, Path(own) / path.name)
            return ctypes.CDLL(str(Path(own) / path.name))  # stays loaded when its file is gone


def _build(compiler: str, path: Path) -> None:
    """Into a file beside it, moved when whole: another process may be doing the same."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="build-") as folder:
        made = Path(folder) / path.name
        sources = [str(source) for source in sorted(SOURCES.glob("*.cc"))]
        command = [compiler, *_FLAGS, "-I", jax.ffi.include_dir(), "-I", str(SOURCES), *sources, "-o", str(made)]
        subprocess.run(command, check=True, capture_output=True, timeout=_TIMEOUT_S)
        os.replace(made, path)


def _reason(error: Exception) -> str:
    said = getattr(error, "stderr", None)
    lines = said.decode(errors="replace").strip().splitlines() if said else []
    return lines[0] if lines else str(error)
