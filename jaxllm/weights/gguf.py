"""GGUF checkpoints under Hugging Face's names, dequantised slice by slice.

llama.cpp stores the rows of q and k of architecture "llama" in another order: within a head,
Hugging Face rotates row i with row i + H/2, and GGUF puts the two side by side (rows 2i and 2i + 1).
The order is undone on the stored rows, before they are dequantised.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxllm.config.gguf_file import GGUFFile
from jaxllm.config.hf.keys import Keys
from jaxllm.errors import WeightsError
from jaxllm.weights.blocks import dequantize
from jaxllm.weights.spec import StoredTensor

_LAYER = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class NameMap:
    """How a GGUF architecture names and orders its tensors."""

    top: Mapping[str, str]  # whole names
    layer: Mapping[str, str]  # between "blk.N." and ".weight"
    permuted: Mapping[str, str]  # name in the layer -> metadata key of its number of heads
    ignored: frozenset[str] = frozenset()  # read elsewhere, or derived


_LLAMA = NameMap(
    top={
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    },
    layer={
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    },
    permuted={"attn_q": "llama.attention.head_count", "attn_k": "llama.attention.head_count_kv"},
    ignored=frozenset({"rope_freqs.weight"}),  # the configuration reads it: jaxllm.config.hf.llama
)
NAME_MAPS: Mapping[str, NameMap] = {"llama": _LLAMA}  # by general.architecture


class GGUFSource:
    """A `TensorSource` over one .gguf file.

    Raises:
        WeightsError: the file is broken, or of an architecture without a name map.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = GGUFFile.open(path)
        keys = Keys(str(path), self._file.metadata, WeightsError)
        architecture = keys.text("general.architecture")
        if architecture not in NAME_MAPS:
            raise WeightsError(f"{path}: no names are known for GGUF architecture {architecture[:80]!r}")
        names = NAME_MAPS[architecture]
        self.tensors: dict[str, StoredTensor] = {}
        self._orders: dict[str, npt.NDArray[np.intp]] = {}
        for tensor in self._file.tensors.values():
            if tensor.name in names.ignored:
                continue
            name = _hugging_face_name(tensor.name, names)
            self.tensors[name] = StoredTensor(tensor.name, tensor.shape, tensor.type, tensor.num_bytes)
            heads_key = _permuted_by(tensor.name, names)
            if heads_key is not None:
                default = keys.integer("llama.attention.head_count")
                self._orders[name] = self._row_order(tensor.name, tensor.shape[0], keys.integer(heads_key, default))

    def _row_order(self, name: str, num_rows: int, num_heads: int) -> npt.NDArray[np.intp]:
        """The stored row of each of Hugging Face's rows."""
        if num_rows % (2 * num_heads):
            raise WeightsError(
                f"{self.path}: tensor {name!r} has {num_rows} rows, which is no even number for {num_heads} heads"
            )
        return np.arange(num_rows).reshape(num_heads, -1, 2).swapaxes(1, 2).reshape(-1)

    def rows(self, name: str, start: int, stop: int) -> npt.NDArray[Any]:
        stored = self.tensors[name]
        raw = self._file.data(stored.stored_name)
        try:
            if len(stored.shape) == 1:  # a block may hold several entries
                values = dequantize(raw, stored.dtype)
                return values[self._orders[name][start:stop]] if name in self._orders else values[start:stop]
            raw = raw.reshape(stored.shape[0], -1)
            raw = raw[self._orders[name][start:stop]] if name in self._orders else raw[start:stop]
            return dequantize(raw.reshape(-1), stored.dtype).reshape(stop - start, *stored.shape[1:])
        except WeightsError as error:
            raise WeightsError(f"{self.path}: tensor {stored.stored_name!r}: {error}") from None

    def close(self) -> None:
        """Nothing to do: the mapping goes with the last view of it."""


def _hugging_face_name(name: str, names: NameMap) -> str:
    """The name in Hugging Face's spelling; an unknown one stays, and is reported as extra."""
    match = _LAYER.fullmatch(name)
    if match and match[2] in names.layer:
        return f"model.layers.{int(match[1])}.{names.layer[match[2]]}.{match[3]}"
    return names.top.get(name, name)


def _permuted_by(name: str, names: NameMap) -> str | None:
    match = _LAYER.fullmatch(name)
    return names.permuted.get(match[2]) if match else None
