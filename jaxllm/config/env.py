"""The one file that reads the environment.

JAXLLM_CACHE_DIR   compiled programs (unused ones go after 30 days); default ~/.cache/jaxllm
JAXLLM_API_KEY     a key the server asks for, besides those of --api-key
XLA_FLAGS          read, with LIBTPU_INIT_ARGS, only to tell apart what they made the compiler produce
HF_HUB_OFFLINE     1: a Hub id is looked up in the local cache alone
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from jaxllm.errors import ConfigError

_YES = {"1", "true", "yes", "on"}
_NO = {"", "0", "false", "no", "off"}


@dataclass(frozen=True, slots=True)
class Environment:
    cache_dir: Path
    api_keys: tuple[str, ...] = ()
    hub_offline: bool = False


def read_environment(variables: Mapping[str, str] | None = None) -> Environment:
    """The settings found in `variables` (default: the environment of the process).

    Raises:
        ConfigError: naming the variable, its value and what is accepted.
    """
    values = os.environ if variables is None else variables
    key = values.get("JAXLLM_API_KEY", "").strip()
    return Environment(_cache_dir(values), (key,) if key else (), _is_on(values, "HF_HUB_OFFLINE"))


def compiler_flags(variables: Mapping[str, str] | None = None) -> tuple[str, str]:
    """What the environment tells XLA's compilers. The same program compiles to another one under other flags."""
    values = os.environ if variables is None else variables
    return values.get("XLA_FLAGS", ""), values.get("LIBTPU_INIT_ARGS", "")


def _cache_dir(values: Mapping[str, str]) -> Path:
    text = values.get("JAXLLM_CACHE_DIR", "").strip()
    try:
        path = Path(text or "~/.cache/jaxllm").expanduser()
    except RuntimeError as error:  # no home directory
        raise ConfigError(f"JAXLLM_CACHE_DIR={text!r} cannot be resolved ({error}); accepted: a folder") from error
    if path.exists() and not path.is_dir():
        raise ConfigError(f"JAXLLM_CACHE_DIR={text!r} is not a folder")
    return path.absolute()


def _is_on(values: Mapping[str, str], name: str) -> bool:
    text = values.get(name, "").strip().lower()
    if text in _YES | _NO:
        return text in _YES
    raise ConfigError(f"{name}={values[name]!r} is not a switch; accepted: 1 or 0")
