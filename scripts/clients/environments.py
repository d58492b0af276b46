"""An environment for each client, kept in a cache folder and made again when its versions change."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


class Missing(Exception):
    """What a client needs is not on this machine."""


def default_cache() -> Path:
    root = os.environ.get("JAXLLM_CACHE_DIR") or Path.home() / ".cache" / "jaxllm"
    return Path(root) / "clients"


def python_environment(folder: Path, requirements: Path) -> Path:
    """The interpreter of a virtual environment that holds `requirements`."""
    python = folder / "bin" / "python"
    wanted = requirements.read_text()
    if _is_ready(folder, wanted):
        return python
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    _call([sys.executable, "-m", "venv", str(folder)])
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
    _call([*pip, "--requirement", str(requirements)])
    (folder / ".ready").write_text(wanted)
    return python


def node_environment(folder: Path, package: Path) -> Path:
    """A folder with node_modules as `package` (a package.json) wants them; scripts are copied there to run.

    Raises:
        Missing: there is no node or npm.
    """
    if shutil.which("node") is None or shutil.which("npm") is None:
        raise Missing("node and npm are not on the PATH")
    wanted = package.read_text()
    if _is_ready(folder, wanted):
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shutil.copy(package, folder / "package.json")
    _call(["npm", "install", "--no-audit", "--no-fund", "--loglevel=error"], folder)
    (folder / ".ready").write_text(wanted)
    return folder


def _is_ready(folder: Path, wanted: str) -> bool:
    stamp = folder / ".ready"
    return stamp.exists() and stamp.read_text() == wanted


def _call(command: list[str], folder: Path | None = None) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
