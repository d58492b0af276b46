"""Safetensors: one file and shards, against the library's own reader, and what is refused."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxllm.errors import WeightsError
from jaxllm.weights.load import load_weights
from jaxllm.weights.safetensors import SafetensorsSource
from tests.weights import twins

INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_one_file_and_shards_load_the_same(tmp_path: Path, dtype: Any) -> None:
    tensors = twins.random_tensors(dtype=dtype)
    single = twins.write_folder(tmp_path / "single", tensors)
    sharded = twins.write_shards(tmp_path / "sharded", tensors)
    wanted = twins.expected({k: v.astype(np.float32) for k, v in load_file(single / "model.safetensors").items()})
    twins.check_loaded(load_weights(single, twins.specs(), twins.params()), wanted)
    twins.check_loaded(load_weights(sharded, twins.specs(), twins.params()), wanted)


def test_load_01_a_tied_folder_loads_and_a_separate_output_matrix_beside_it_is_ignored(tmp_path: Path) -> None:
    tensors = twins.random_tensors()
    untied = tensors | {"lm_head.weight": np.ones((twins.V, twins.D), np.float32)}
    folder = twins.write_folder(tmp_path / "both", untied)
    twins.check_loaded(load_weights(folder, twins.specs(), twins.params()), twins.expected(tensors))


def test_one_file_may_have_any_name(tmp_path: Path) -> None:
    save_file(twins.random_tensors(), tmp_path / "weights.safetensors")
    assert len(SafetensorsSource(tmp_path).tensors) == len(twins.specs())


def test_only_what_the_index_names_is_read(tmp_path: Path) -> None:
    tensors = twins.random_tensors()
    folder = twins.write_shards(tmp_path / "m", tensors)
    save_file({"other.weight": np.zeros(3, np.float32)}, folder / "consolidated.safetensors")
    index = json.loads((folder / INDEX).read_text())
    shard = folder / index["weight_map"]["model.norm.weight"]
    save_file(load_file(shard) | {"not.indexed": np.zeros(3, np.float32)}, shard)
    twins.check_loaded(load_weights(folder, twins.specs(), twins.params()), twins.expected(tensors))


def test_buffers_of_old_checkpoints_are_ignored(tmp_path: Path) -> None:
    tensors = twins.random_tensors()
    buffers = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(8, np.float32)}
    folder = twins.write_folder(tmp_path / "m", tensors | buffers)
    twins.check_loaded(load_weights(folder, twins.specs(), twins.params()), twins.expected(tensors))


@pytest.mark.parametrize("length", [0, 5, 8, 100, -1, -1000])
def test_a_cut_file_is_refused(tmp_path: Path, length: int) -> None:
    folder = twins.write_folder(tmp_path / "m", twins.random_tensors())
    file = folder / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:length])
    with pytest.raises(WeightsError, match=r"model.safetensors: cannot read the file, it is broken or cut off"):
        SafetensorsSource(folder)


def test_a_header_that_lies_is_refused(tmp_path: Path) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 64)
    with pytest.raises(WeightsError, match="broken or cut off"):
        SafetensorsSource(tmp_path)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({}, "key 'weight_map' is no object"),
        ({"weight_map": {}}, "key 'weight_map' is no object"),
        ({"weight_map": {"w": 5}}, "tensor 'w' is in 5; accepted: a .safetensors file here"),
        ({"weight_map": {"w": "../model.safetensors"}}, "tensor 'w' is in '../model.safetensors'"),
        ({"weight_map": {"w": "pytorch_model.bin"}}, "tensor 'w' is in 'pytorch_model.bin'"),
        ({"weight_map": {"w": "none.safetensors"}}, "none.safetensors is missing; .* tensor 'w' is in it"),
        ({"weight_map": {"absent": "model.safetensors"}}, "lacks tensor 'absent', which .* says is in it"),
    ],
)
def test_a_broken_index_is_refused(tmp_path: Path, index: dict[str, Any], message: str) -> None:
    folder = twins.write_folder(tmp_path / "m", twins.random_tensors())
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(WeightsError, match=message):
        SafetensorsSource(folder)


def test_an_index_that_is_no_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text("{")
    with pytest.raises(WeightsError, match="cannot read it as JSON"):
        SafetensorsSource(tmp_path)


def test_shards_without_an_index_are_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_file({name: np.zeros(2, np.float32)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(WeightsError, match=r"has 2 safetensors files and no model.safetensors.index.json"):
        SafetensorsSource(tmp_path)


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"has no weights; accepted: model.safetensors"):
        SafetensorsSource(tmp_path)


class WritesMarker:
    """A pickle of this writes a file when it is read."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return (Path.write_text, (self.marker, "ran"))


def test_load_06_a_pickle_is_refused_and_its_code_never_runs(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(WritesMarker(marker)))
    with pytest.raises(WeightsError, match="pickle, which could run code"):
        load_weights(folder, twins.specs(), twins.params())
    assert not marker.exists()


def test_a_dtype_that_is_no_float_is_refused(tmp_path: Path) -> None:
    tensors = twins.random_tensors() | {"model.norm.weight": np.zeros(twins.D, np.int8)}
    folder = twins.write_folder(tmp_path / "m", tensors)
    with pytest.raises(WeightsError, match=r"tensor 'model.norm.weight' has dtype I8; accepted: F64, F32, F16, BF16"):
        load_weights(folder, twins.specs(), twins.params())
