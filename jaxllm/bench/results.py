"""Where results go: tables for people, one JSON object for programs, a picture."""

from __future__ import annotations

import json
import math
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jaxllm
from jaxllm.bench.serve_args import ServeArgs
from jaxllm.bench.tables import Row, table
from jaxllm.errors import ConfigError

_SECRET = ("api_key", "header")


class Results:
    """Collects what a measurement found. Mutable; owned by the command.

    Made before the measurement, so that a file that cannot be written is refused first.

    Raises:
        ConfigError: a file cannot be written there.
    """

    def __init__(
        self, kind: str, json_path: str | None, plot_path: Path | None, args: Sequence[Any], *, model: str | None
    ) -> None:
        self._kind = kind
        self._to_stdout = json_path == "-"
        self._json_path = None if json_path is None or self._to_stdout else Path(json_path).expanduser()
        self._plot_path = plot_path
        self._settings = {name: value for each in args for name, value in asdict(each).items() if name not in _SECRET}
        self._model = model
        self._parts: list[str] = []
        for name, path in (("json", self._json_path), ("plot", plot_path)):
            if path is not None:
                check_writable(name, path)
        if plot_path is not None:
            from jaxllm.bench.plots import check_plot

            check_plot(plot_path)

    def add(self, title: str, rows: Sequence[Row]) -> None:
        """A table, shown by `write`."""
        self._parts.append("\n".join(filter(None, [title, table(rows)])))

    def write(self, figures: Mapping[str, Any], plot: Callable[[Path], None]) -> None:
        """Tables to stdout (to stderr where JSON goes there), JSON and picture where they were asked for."""
        print("\n\n".join(self._parts), file=sys.stderr if self._to_stdout else sys.stdout)
        whole = {**self._about(), **figures}
        if self._to_stdout:
            print(json.dumps(_finite(whole)))
        elif self._json_path is not None:
            self.save(self._json_path, figures)
        if self._plot_path is not None:
            plot(self._plot_path)

    def save(self, path: Path, figures: Mapping[str, Any]) -> None:
        """Raises: ConfigError: the file cannot be written."""
        try:
            path.write_text(json.dumps(_finite({**self._about(), **figures})) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from error

    def _about(self) -> dict[str, Any]:
        return {
            "bench": self._kind,
            "date": time.strftime("%Y%m%d-%H%M%S"),
            "jaxllm": jaxllm.__version__,
            "python": platform.python_version(),
            "machine": platform.machine(),
            "model": self._model,
            "settings": self._settings,
        }


def check_writable(name: str, path: Path) -> None:
    """Raises: ConfigError: there is no such folder, it cannot be written to, or the path is one."""
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        accepted = "a name in a folder that exists and can be written to"
        raise ConfigError(f"{name}={str(path)!r} is no place for a file; accepted: {accepted}")


def result_file(args: ServeArgs, model: str) -> Path:
    """Where `save_result` writes: the name that was given, else one like vLLM's."""
    name = args.result_filename
    if name is None:
        concurrency = "" if args.max_concurrency is None else f"-concurrency{args.max_concurrency}"
        base = re.sub(r"[^\w.+-]", "_", model.rstrip("/").rsplit("/", 1)[-1])
        label = args.label or args.backend
        name = f"{label}-{args.request_rate}qps{concurrency}-{base}-{time.strftime('%Y%m%d-%H%M%S')}.json"
    folder = Path(args.result_dir).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"result_dir={args.result_dir!r} cannot be made: {error.strerror}") from None
    return folder / name


def _finite(value: Any) -> Any:
    """JSON has no infinity: as text, like vLLM's request_rate."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
