"""The one place that knows which jax this is and what device it will run on.

Pallas internals are imported here and nowhere else, each behind a question that is answered by looking for the
feature, not by comparing version numbers.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import jax

_PLATFORM_OF = {"cuda": "gpu", "rocm": "gpu"}


def default_platform() -> str:
    """Where ("cpu", "gpu" or "tpu") a computation traced now will run if nobody says otherwise.

    The configuration is asked first; backends are started only if it leaves the question open.
    """
    settings: Any = jax.config  # its attributes are made at run time
    device = settings.jax_default_device
    if device is not None:
        return _canonical(device if isinstance(device, str) else device.platform)
    configured = [name for name in (settings.jax_platforms or "").split(",") if name]
    if len(configured) == 1:
        return _canonical(configured[0])
    return _canonical(jax.default_backend())


def _canonical(name: str) -> str:
    return _PLATFORM_OF.get(name, name)


def mosaic_tpu() -> ModuleType:
    """`jax.experimental.pallas.tpu`. Raises ImportError where this jax has none."""
    from jax.experimental.pallas import tpu

    return tpu


def mosaic_gpu() -> ModuleType:
    """`jax.experimental.pallas.mosaic_gpu`. Raises ImportError where it is missing or too old to call kernels."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if not hasattr(plgpu, "kernel"):
        raise ImportError(f"jax {jax.__version__} has no pallas.mosaic_gpu.kernel")
    return plgpu


def has_gpu_interpreter() -> bool:
    """Whether Mosaic GPU kernels can be interpreted here (public from jax 0.11 on)."""
    try:
        return hasattr(mosaic_gpu(), "InterpretGPUParams")
    except ImportError:
        return False
