"""`jaxllm models`: what is supported, from the registries."""

from __future__ import annotations

import json
from typing import Any

from jaxllm.cli.flags import Flag, parse


def main(argv: list[str]) -> int:
    values = parse("models", __doc__ or "", [Flag("json", "switch", "one JSON object", False)], argv)
    table = supported()
    if values["json"]:
        print(json.dumps(table))
        return 0
    for title, names in table.items():
        print(f"{title.replace('_', ' ')}: {', '.join(names)}")
    return 0


def supported() -> dict[str, list[str]]:
    """Names by kind."""
    from jaxllm.config.checkpoint import PACKAGED_MODELS
    from jaxllm.config.hf.registry import GGUF_ARCHITECTURES, HF_ARCHITECTURES

    return {
        "architectures": sorted(HF_ARCHITECTURES),
        "gguf_architectures": sorted(GGUF_ARCHITECTURES),
        "formats": ["safetensors folder (Hugging Face)", f"gguf ({', '.join(_block_types())})"],
        "aliases": [f"{alias} (package {model.distribution})" for alias, model in PACKAGED_MODELS.items()],
    }


def _block_types() -> list[str]:
    from gguf import GGMLQuantizationType
    from gguf.quants import _type_traits  # the library's own table of what it can dequantise

    traits: dict[Any, Any] = _type_traits
    return ["F32", "F16", *sorted(GGMLQuantizationType(kind).name for kind in traits)]
