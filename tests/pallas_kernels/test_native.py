"""The native kernels as a build: found again or made anew, and every way in which there are none."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import stacked_matmul
from pallas_kernels._core import native
from pallas_kernels.ragged_paged_attention import choose as choose_attention
from pallas_kernels.ragged_paged_attention.problem import Problem as AttentionProblem
from pallas_kernels.stacked_matmul import choose
from pallas_kernels.stacked_matmul.problem import Problem
from tests.pallas_kernels import harness

REPO = Path(__file__).resolve().parents[2]
ATTENTION = AttentionProblem(num_kv_heads=2, head_dim=16, kv_dtype="float32")
BUILT = native.native()

# Stands in for a compiler: notes each call in a file, and gives the library that the real one made.
COMPILER = """#!/bin/sh
echo called >> "{log}"
{first}
while [ $# -gt 1 ]; do
  if [ "$1" = -o ]; then exec cp "{library}" "$2"; fi
  shift
done
"""


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """A machine on which nothing is built; -> its cache folder."""
    cache = tmp_path / "cache"
    for name in ("CXX", "PALLAS_KERNELS_NATIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PALLAS_KERNELS_CACHE_DIR", str(cache))
    native.native.cache_clear()
    yield cache
    monkeypatch.undo()
    native.native.cache_clear()


@pytest.fixture(scope="module")
def library():
    """A library that some earlier call built."""
    if BUILT.why_not is not None:
        pytest.skip(BUILT.why_not)
    folder = Path(os.environ.get("PALLAS_KERNELS_CACHE_DIR") or "~/.cache/pallas_kernels").expanduser()
    path = folder / f"native-{BUILT.digest[:24]}.so"
    if not path.exists():
        pytest.skip("the library was built for this process alone")
    return path


def script(path, text):
    path.write_text(text)
    path.chmod(0o755)
    return path


def pretend_compiler(tmp_path, library, first=":"):
    """-> (the compiler, how often it was called)."""
    log = tmp_path / "calls"
    made = script(tmp_path / "cxx", COMPILER.format(log=log, library=library, first=first))
    return made, lambda: len(log.read_text().splitlines()) if log.exists() else 0


def check_xla_serves(reason):
    """Both ops go to `xla`, the report gives `reason`, and what is computed is right."""
    assert native.fingerprint() == "none"
    for report in (choose(Problem("float32", "float32")), choose_attention(ATTENTION)):
        assert report.chosen.name == "xla"
        assert reason in report.why_not["native"]
    x, weights = np.eye(2, 3, dtype=np.float32), np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    np.testing.assert_array_equal(stacked_matmul(jnp.asarray(x), jnp.asarray(weights), 1), weights[1, :2])


def test_without_a_compiler_xla_serves_and_the_report_says_what_was_looked_for(fresh, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    check_xla_serves("no C++ compiler found; looked for /nonexistent/c++")
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    native.native.cache_clear()
    check_xla_serves("no C++ compiler found; looked for g++, clang++, c++")
    assert not fresh.exists()


def test_what_a_failing_compiler_says_is_the_reason(fresh, monkeypatch, tmp_path):
    broken = script(tmp_path / "cxx", "#!/bin/sh\necho 'cxx: error: no such language' >&2\necho more >&2\nexit 1\n")
    monkeypatch.setenv("CXX", str(broken))
    check_xla_serves(f"{broken} does not build it: cxx: error: no such language")
    assert "more" not in str(native.why_not())
    assert list(fresh.iterdir()) == []  # nothing half made is left


def test_a_compiler_that_makes_no_library_is_named(fresh, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", str(script(tmp_path / "cxx", "#!/bin/sh\nexit 0\n")))
    check_xla_serves("cxx does not build it: ")


def test_the_environment_turns_it_off(fresh, monkeypatch):
    monkeypatch.setenv("PALLAS_KERNELS_NATIVE", "0")
    check_xla_serves("PALLAS_KERNELS_NATIVE=0 turns it off")
    assert not fresh.exists()


def test_a_library_is_built_once_and_found_again(fresh, monkeypatch, tmp_path, library):
    compiler, num_calls = pretend_compiler(tmp_path, library)
    monkeypatch.setenv("CXX", str(compiler))
    first = native.native()
    assert (first.why_not, num_calls()) == (None, 1)
    assert [path.name for path in fresh.iterdir()] == [f"native-{first.digest[:24]}.so"]
    native.native.cache_clear()
    assert (native.native(), num_calls()) == (first, 1)
    assert native.fingerprint() == first.digest
    assert choose(Problem("float32", "float32")).chosen.name == "native"
    assert choose_attention(ATTENTION).chosen.name == "native"


def test_a_changed_source_is_another_library(fresh, monkeypatch, tmp_path, library):
    compiler, num_calls = pretend_compiler(tmp_path, library)
    monkeypatch.setenv("CXX", str(compiler))
    before = native.native()
    sources = shutil.copytree(native.SOURCES, tmp_path / "sources")
    monkeypatch.setattr(native, "SOURCES", sources)
    native.native.cache_clear()
    assert (native.native(), num_calls()) == (before, 1)  # where they lie does not matter
    header = sources / "simd.h"
    header.write_text(header.read_text() + "\n")
    native.native.cache_clear()
    after = native.native()
    assert num_calls() == 2
    assert after.digest != before.digest
    assert set(after.targets.values()).isdisjoint(before.targets.values())  # stored programs find their own build


def test_another_compiler_is_another_library(fresh, monkeypatch, tmp_path, library):
    compiler, num_calls = pretend_compiler(tmp_path, library)
    monkeypatch.setenv("CXX", str(compiler))
    before = native.native().digest
    script(compiler, compiler.read_text() + "# an upgrade\n")
    native.native.cache_clear()
    assert native.native().digest != before
    assert num_calls() == 2


@pytest.mark.parametrize("kind", ["no folder can be made", "a damaged library"])
def test_where_the_cache_cannot_serve_the_library_is_built_for_this_process(
    fresh, monkeypatch, tmp_path, library, kind
):
    compiler, num_calls = pretend_compiler(tmp_path, library)
    monkeypatch.setenv("CXX", str(compiler))
    if kind == "no folder can be made":
        fresh.write_text("a file")
    else:
        fresh.mkdir()
        (fresh / f"native-{native._digest(str(compiler))[:24]}.so").write_text("half of a library")
    monkeypatch.setattr(native.tempfile, "tempdir", str(tmp_path / "own"))
    (tmp_path / "own").mkdir()
    assert native.why_not() is None
    assert num_calls() == 1
    assert list((tmp_path / "own").iterdir()) == []  # loaded, and its file removed
    x, weights = np.eye(2, 3, dtype=np.float32), np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    got = stacked_matmul(jnp.asarray(x), jnp.asarray(weights), 1, implementation="native")
    np.testing.assert_array_equal(got, weights[1, :2])


def test_a_cache_folder_that_takes_no_files_is_done_without(fresh, monkeypatch, tmp_path, library):
    compiler, num_calls = pretend_compiler(tmp_path, library)
    monkeypatch.setenv("CXX", str(compiler))
    fresh.mkdir()
    make = native.tempfile.TemporaryDirectory

    def refuse(*args, **options):  # permissions would not stop a superuser
        if options.get("dir") == fresh:
            raise PermissionError(13, "Permission denied", str(fresh))
        return make(*args, **options)

    monkeypatch.setattr(native.tempfile, "TemporaryDirectory", refuse)
    assert native.why_not() is None
    assert num_calls() == 1
    assert list(fresh.iterdir()) == []


def test_two_processes_may_build_at_once(fresh, tmp_path, library):
    # Neither compiler goes on before both were called.
    both = 'until [ "$(wc -l < "{log}")" -ge 2 ]; do sleep 0.05; done'.format(log=tmp_path / "calls")
    compiler, num_calls = pretend_compiler(tmp_path, library, first=both)
    environment = os.environ | {"CXX": str(compiler), "PALLAS_KERNELS_CACHE_DIR": str(fresh), "JAX_PLATFORMS": "cpu"}
    code = "from pallas_kernels._core import native; print(native.why_not(), native.fingerprint())"
    processes = [
        subprocess.Popen([sys.executable, "-c", code], cwd=REPO, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [process.communicate(timeout=120)[0].split() for process in processes]
    assert num_calls() == 2
    assert said[0] == said[1]
    assert said[0][0] == "None"
    assert [path.name for path in fresh.iterdir()] == [f"native-{said[0][1][:24]}.so"]


@harness.needs_native
def test_the_fingerprint_is_that_of_the_build_on_cpus_and_the_same_everywhere_else(monkeypatch):
    assert native.fingerprint() == native.native().digest
    assert len(native.fingerprint()) == 64
    monkeypatch.setattr(native, "default_platform", lambda: "gpu")
    assert native.fingerprint() == "none"


@harness.needs_native
def test_programs_name_the_build_they_want():
    x, weights = jnp.zeros((2, 3), jnp.float32), jnp.zeros((1, 3, 4), jnp.float32)
    text = jax.jit(lambda x, w: stacked_matmul(x, w, 0, implementation="native")).lower(x, weights).as_text()
    assert f"pallas_kernels.matmul.{native.fingerprint()[:12]}" in text
