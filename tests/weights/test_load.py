"""The loader: names and shapes are checked, progress is told, and memory stays near one parameter."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import save_file

from jaxllm.errors import WeightsError
from jaxllm.weights.load import load_weights
from jaxllm.weights.spec import TensorSpec
from tests.weights import twins


def load_twin(tmp_path: Path, tensors: twins.Tensors) -> dict[str, jax.Array]:
    return load_weights(twins.write_folder(tmp_path / "m", tensors), twins.specs(), twins.params())


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    tensors = twins.random_tensors()
    del tensors["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(WeightsError, match=r"lacks 1 tensor: model\.layers\.1\.mlp\.up_proj\.weight$"):
        load_twin(tmp_path, tensors)


def test_at_most_five_of_many_are_named(tmp_path: Path) -> None:
    tensors = {name: array for name, array in twins.random_tensors().items() if "layers.1" not in name}
    with pytest.raises(WeightsError, match=r"lacks 9 tensors: (model\.layers\.1\.\S+; ){4}\S+ and 4 more$"):
        load_twin(tmp_path, tensors)


def test_an_extra_tensor_is_named(tmp_path: Path) -> None:
    tensors = twins.random_tensors() | {"model.layers.2.mlp.up_proj.weight": np.zeros((2, 2), np.float32)}
    with pytest.raises(WeightsError, match=r"has 1 tensor: model\.layers\.2\.mlp\.up_proj\.weight that this model"):
        load_twin(tmp_path, tensors)


def test_an_extra_tensor_of_a_gguf_file_keeps_its_name_there(tmp_path: Path) -> None:
    extra = {"blk.0.attn_sinks.weight": np.zeros(4, np.float32)}
    file = twins.write_gguf(tmp_path / "m.gguf", twins.random_tensors(), extra=extra)
    with pytest.raises(WeightsError, match=r"has 1 tensor: blk\.0\.attn_sinks\.weight"):
        load_weights(file, twins.specs(), twins.params())


def test_the_divisors_of_rope_in_a_gguf_file_are_no_extra_tensor(tmp_path: Path) -> None:
    tensors = twins.random_tensors()
    file = twins.write_gguf(tmp_path / "m.gguf", tensors, extra={"rope_freqs.weight": np.ones(8, np.float32)})
    twins.check_loaded(load_weights(file, twins.specs(), twins.params()), twins.expected(tensors))


def test_another_shape_is_named_with_the_one_that_is_wanted(tmp_path: Path) -> None:
    tensors = twins.random_tensors() | {"model.norm.weight": np.zeros(63, np.float32)}
    with pytest.raises(WeightsError, match=r"another shape in 1 tensor: model\.norm\.weight \(63,\), not \(64,\)"):
        load_twin(tmp_path, tensors)


def test_a_parameter_that_nothing_fills_is_refused(tmp_path: Path) -> None:
    folder = twins.write_folder(tmp_path / "m", twins.random_tensors())
    params = twins.params() | {"other.weight": jax.ShapeDtypeStruct((2,), np.float32)}
    with pytest.raises(WeightsError, match=r"parameter other\.weight \(2,\) is given 0 elements"):
        load_weights(folder, twins.specs(), params)


def test_a_tensor_without_a_parameter_is_refused(tmp_path: Path) -> None:
    folder = twins.write_folder(tmp_path / "m", twins.random_tensors())
    specs = [replace(spec, target="none" if spec.target == "norm.weight" else spec.target) for spec in twins.specs()]
    with pytest.raises(WeightsError, match=r"model\.norm\.weight belongs to parameter none"):
        load_weights(folder, specs, twins.params())


def test_values_beyond_float16_are_refused_rather_than_infinite(tmp_path: Path) -> None:
    tensors = twins.random_tensors()
    tensors["model.norm.weight"][3] = 1e6
    folder = twins.write_folder(tmp_path / "m", tensors)
    with pytest.raises(WeightsError, match=r"'model.norm.weight' has values beyond float16; try bfloat16"):
        load_weights(folder, twins.specs(), twins.params(np.float16))


def test_progress_ends_at_the_bytes_of_the_checkpoint(tmp_path: Path) -> None:
    tensors = twins.random_tensors()
    for path in (twins.write_folder(tmp_path / "m", tensors), twins.write_gguf(tmp_path / "m.gguf", tensors)):
        seen: list[tuple[int, int]] = []
        load_weights(path, twins.specs(), twins.params(), progress=lambda *step: seen.append(step))  # noqa: B023
        total = sum(array.nbytes for array in tensors.values())
        assert seen[-1] == (total, total)
        assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_a_large_tensor_is_read_in_several_slices(tmp_path: Path) -> None:
    table = np.random.default_rng(0).standard_normal((5000, 128), np.float32)
    save_file({"t": table}, tmp_path / "model.safetensors")
    seen: list[int] = []
    for transpose in (False, True):
        shape = (128, 5000) if transpose else (5000, 128)
        loaded = load_weights(
            tmp_path,
            [TensorSpec("t", (5000, 128), "t", transpose=transpose)],
            {"t": jax.ShapeDtypeStruct(shape, np.float32)},
            progress=lambda done, total: seen.append(done),
        )
        np.testing.assert_array_equal(np.asarray(loaded["t"]), table.T if transpose else table)
    assert len(seen) == 6


def test_a_parameter_goes_where_its_sharding_says(tmp_path: Path) -> None:
    tensors = twins.random_tensors()
    folder = twins.write_folder(tmp_path / "m", tensors)
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:2]), "x"), PartitionSpec("x"))
    params = twins.params()
    params["embed.weight"] = jax.ShapeDtypeStruct((twins.V, twins.D), np.float32, sharding=sharding)
    loaded = load_weights(folder, twins.specs(), params)
    assert loaded["embed.weight"].sharding == sharding
    twins.check_loaded(loaded, twins.expected(tensors))


def test_the_host_holds_the_weights_and_little_more(tmp_path: Path) -> None:
    """On a CPU the arrays are the device's memory: nothing is copied, whole tensors are never held."""
    num, size = 8, 1024
    rng = np.random.default_rng(0)
    save_file(
        {f"t{i}": rng.standard_normal((size, size), np.float32) for i in range(num)}, tmp_path / "model.safetensors"
    )
    specs = [TensorSpec(f"t{i}", (size, size), f"t{i}", transpose=True) for i in range(num)]
    params = {f"t{i}": jax.ShapeDtypeStruct((size, size), np.float32) for i in range(num)}
    tracemalloc.start()
    try:
        loaded = load_weights(tmp_path, specs, params)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    weights = sum(array.nbytes for array in loaded.values())
    assert weights == num * size * size * 4
    assert peak < weights + 4 * size * size + 10 * 2**20
