"""The floors hold at run time too: the brain imports with jax made unimportable."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import jaxllm

BRAIN = (
    *("errors", "types", "config", "metrics", "tokenizer", "memory"),
    *("scheduler", "engine", "testing", "server", "bench", "cli"),
)
ROOT = Path(jaxllm.__file__).parent


def block(*names: str) -> str:
    """Code after which an import of any of `names` fails."""
    return f"import sys\nfor name in {names!r}:\n    sys.modules[name] = None\n"


BLOCKED = block("jax", "jaxlib", "flax", "pallas_kernels", "orbax")


def modules_of(room: str) -> list[str]:
    if (ROOT / f"{room}.py").exists():
        return [f"jaxllm.{room}"]
    prefix = f"jaxllm.{room}."
    found = [m.name for m in pkgutil.walk_packages([str(ROOT / room)], prefix)]
    return [f"jaxllm.{room}", *found]


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("room", BRAIN)
def test_brain_room_imports_without_jax(room: str) -> None:
    modules = modules_of(room)
    assert modules
    done = run(BLOCKED + "import importlib\n" + "\n".join(f"importlib.import_module({m!r})" for m in modules))
    assert done.returncode == 0, done.stderr[-2000:]


def test_import_jaxllm_imports_nothing_else() -> None:
    code = "import sys\nbefore = set(sys.modules)\nimport jaxllm\nprint(*sorted(set(sys.modules) - before))"
    loaded = run(code).stdout.split()
    assert "jaxllm" in loaded
    heavy = {"jax", "numpy", "msgspec", "tokenizers", "transformers"}
    assert {name.partition(".")[0] for name in loaded} & heavy == set()


def test_public_names_resolve() -> None:
    for name in jaxllm.__all__:
        assert getattr(jaxllm, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = jaxllm.no_such_name


def test_pallas_kernels_imports_with_jax_and_numpy_alone() -> None:
    blocked = block("jaxllm", "flax", "transformers", "tokenizers", "msgspec")
    done = run(blocked + "import pallas_kernels\nassert callable(pallas_kernels.ragged_paged_attention)")
    assert done.returncode == 0, done.stderr[-2000:]
