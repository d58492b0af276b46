"""The bfloat16 copy of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from jaxllm.weights.safetensors import SafetensorsSource
from scripts.bench.peer_models import write_bfloat16


def test_weights_are_rounded_to_the_nearest_and_the_rest_is_the_same(tmp_path: Path) -> None:
    source, folder = tmp_path / "a", tmp_path / "b"
    source.mkdir()
    values = np.array([[1.0, 1.001, 1.007], [-3.0, 1e-30, 65537.0]], np.float32)
    save_file({"w": values}, source / "model.safetensors")
    (source / "config.json").write_text('{"torch_dtype": "float32", "vocab_size": 7}')
    (source / "tokenizer.json").write_text("{}")
    write_bfloat16(source, folder)
    assert json.loads((folder / "config.json").read_text()) == {"torch_dtype": "bfloat16", "vocab_size": 7}
    assert (folder / "tokenizer.json").read_text() == "{}"
    found = SafetensorsSource(folder)
    rounded = found.rows("w", 0, 2)
    assert rounded.dtype.name == "bfloat16"
    assert np.abs(rounded.astype(np.float32) / values - 1).max() <= 2**-9
    assert rounded[0, 1:].astype(np.float32).tolist() == [1.0, 1.0078125]
    found.close()
