"""The GGUF header reader on sound files, against the reader of the gguf package, and on broken ones."""

from __future__ import annotations

import struct
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from jaxllm.config.checkpoint import resolve_model
from jaxllm.config.gguf_file import GGUFFile
from jaxllm.errors import WeightsError
from tests.config.gguf_bytes import ARRAY, F32, Q4_1, STRING, U32, GGUFBytes, array, pair, tensor, text, u32

BOOL = 7


def write(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    return path


def write_varied(path: Path, alignment: int | None = None) -> None:
    """A file with every kind of value and several types of tensor, by the package's writer."""
    writer = gguf.GGUFWriter(path, "llama")
    if alignment:
        writer.add_custom_alignment(alignment)
    for kind, value in {
        "uint8": 200, "int8": -100, "uint16": 60000, "int16": -30000, "uint32": 4_000_000_000, "int32": -5,
        "uint64": 2**63, "int64": -(2**62), "float32": 1.5, "float64": 0.1, "bool": True, "string": "Grüße 🙂",
    }.items():  # fmt: skip
        getattr(writer, f"add_{kind}")(f"test.{kind}", value)
    writer.add_array("test.strings", ["", "a", "Ġthe", "日本", "x" * 1000])
    writer.add_array("test.integers", [1, -2, 3])
    writer.add_array("test.floats", [0.5, -2.0])
    writer.add_array("test.flags", [True, False])
    rng = np.random.default_rng(0)
    writer.add_tensor("a.weight", rng.standard_normal((3, 64), np.float32))
    writer.add_tensor("b.weight", rng.standard_normal((5, 2, 32), np.float32).astype(np.float16))
    blocks = gguf.quantize(rng.standard_normal((7, 96), np.float32), gguf.GGMLQuantizationType.Q4_1)
    writer.add_tensor("c.weight", blocks, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    writer.add_tensor("d.bias", rng.standard_normal(9, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def check_against_package(path: Path) -> None:
    ours, theirs = GGUFFile.open(path), gguf.GGUFReader(path)
    fields = {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert ours.metadata == fields
    assert list(ours.tensors) == [t.name for t in theirs.tensors]
    for other in theirs.tensors:
        mine = ours.tensors[other.name]
        assert mine.shape == tuple(reversed(other.shape.tolist()))
        assert (mine.type, mine.offset, mine.num_bytes) == (other.tensor_type.name, other.data_offset, other.n_bytes)
        assert ours.data(other.name).tobytes() == other.data.tobytes()


@pytest.mark.parametrize("alignment", [None, 8, 256])
def test_values_and_tensors_are_those_of_the_gguf_package(tmp_path: Path, alignment: int | None) -> None:
    path = tmp_path / "varied.gguf"
    write_varied(path, alignment)
    check_against_package(path)


def test_the_default_model_reads_as_with_the_gguf_package() -> None:
    check_against_package(resolve_model(None))


def test_a_large_vocabulary_is_read_quickly() -> None:
    path = resolve_model(None)
    GGUFFile.open(path)  # the import of the block table is not what is timed
    start = time.process_time()
    file = GGUFFile.open(path)
    assert time.process_time() - start < 0.3
    assert len(file.metadata["tokenizer.ggml.tokens"]) == 49152


def test_data_is_a_read_only_view(tmp_path: Path) -> None:
    path = write(tmp_path, GGUFBytes(data=struct.pack("<8f", *range(8))).build())
    data = GGUFFile.open(path).data("w")
    assert data.view("<f4").tolist() == list(range(8))
    assert not data.flags.writeable and not data.flags.owndata


def test_version_2_is_read(tmp_path: Path) -> None:
    assert list(GGUFFile.open(write(tmp_path, GGUFBytes(version=2).build())).tensors) == ["w"]


def test_values_keep_their_python_types(tmp_path: Path) -> None:
    pairs = [pair("flag", BOOL, b"\1"), pair("flags", ARRAY, array(BOOL, 2, b"\1\0")), pair("n", U32, u32(7))]
    metadata = GGUFFile.open(write(tmp_path, GGUFBytes(pairs=pairs).build())).metadata
    assert metadata == {"flag": True, "flags": [True, False], "n": 7}
    assert metadata["flag"] is True and metadata["flags"][0] is True and type(metadata["n"]) is int


BROKEN: dict[str, tuple[GGUFBytes, str]] = {
    "magic": (GGUFBytes(magic=b"GGML"), "not a GGUF file"),
    "version 1": (GGUFBytes(version=1), "version 1 is not served; accepted: 2, 3"),
    "version 4": (GGUFBytes(version=4), "version 4 is not served"),
    "big endian": (GGUFBytes(version=3 << 24), "big-endian"),
    "pairs past the end": (GGUFBytes(num_pairs=1000), "the header needs"),
    "too many pairs": (GGUFBytes(num_pairs=2**40), "key-value pairs; accepted: at most"),
    "too many tensors": (GGUFBytes(num_tensors=2**62), "tensors; accepted: at most"),
    "value type": (GGUFBytes(pairs=[pair("k", 13, b"\0" * 8)]), "'k' has value type 13"),
    "item type": (GGUFBytes(pairs=[pair("k", ARRAY, array(99, 1, b"\0" * 8))]), "'k' has items of value type 99"),
    "nested array": (GGUFBytes(pairs=[pair("k", ARRAY, array(ARRAY, 1, b"\0" * 32))]), "items of value type 9"),
    "array past the end": (GGUFBytes(pairs=[pair("k", ARRAY, array(U32, 10_000, b""))]), "'k' needs 40000 bytes"),
    "array too long": (GGUFBytes(pairs=[pair("k", ARRAY, array(U32, 2**60, b""))]), "in all arrays together"),
    "strings past the end": (GGUFBytes(pairs=[pair("k", ARRAY, array(STRING, 2, text("a") + text(b"")[:4]))]), r"'k'"),
    "string past the end": (GGUFBytes(pairs=[pair("k", STRING, struct.pack("<Q", 2**30))]), "'k' "),
    "no UTF-8": (GGUFBytes(pairs=[pair("k", STRING, text(b"\xff\xfe"))]), "'k' at .* is not UTF-8"),
    "no UTF-8 in an array": (
        GGUFBytes(pairs=[pair("k", ARRAY, array(STRING, 2, text("a") + text(b"\xc3")))]),
        r"'k'\[1\] is not UTF-8",
    ),
    "boolean of 2": (GGUFBytes(pairs=[pair("k", BOOL, b"\2")]), "'k' is a boolean of value 2"),
    "booleans of 2": (GGUFBytes(pairs=[pair("k", ARRAY, array(BOOL, 2, b"\1\2"))]), "booleans with a value of 2"),
    "key twice": (GGUFBytes(pairs=[pair("k", U32, u32(1)), pair("k", U32, u32(2))]), "key 'k' is there twice"),
    "tensor twice": (GGUFBytes(tensors=[tensor("w", (4,)), tensor("w", (4,))]), "tensor 'w' is there twice"),
    "long tensor name": (GGUFBytes(tensors=[tensor("w" * 65, (8,))]), "has 65 bytes; accepted: at most 64"),
    "no dimension": (GGUFBytes(tensors=[tensor("w", ())]), "tensor 'w' has 0 dimensions; accepted: 1 to 4"),
    "a million dimensions": (GGUFBytes(tensors=[tensor("w", (8,), num_dims=10**6)]), "has 1000000 dimensions"),
    "dimension 0": (GGUFBytes(tensors=[tensor("w", (8, 0))]), r"dimensions \[8, 0\]; accepted: at least 1"),
    "overflow": (GGUFBytes(tensors=[tensor("w", (2**32, 2**32, 4, 1))]), "takes 295147905179352825856 bytes"),
    "block type": (GGUFBytes(tensors=[tensor("w", (8,), 1234)]), "block type 1234"),
    "removed block type": (GGUFBytes(tensors=[tensor("w", (32,), 4)]), "block type 4"),
    "half a block": (GGUFBytes(tensors=[tensor("w", (40,), Q4_1)]), "rows of 40; Q4_1 comes in blocks of 32"),
    "unaligned": (GGUFBytes(tensors=[tensor("w", (4,), offset=4)]), "no multiple of the alignment 32"),
    "offset past the end": (GGUFBytes(tensors=[tensor("w", (8,), offset=2**40)]), "ends at byte"),
    "overlap": (GGUFBytes(tensors=[tensor("w", (8,)), tensor("v", (8,))]), "overlaps tensor 'w'"),
    "alignment 2^30": (GGUFBytes(pairs=[pair("general.alignment", U32, u32(2**30))]), "alignment is '1073741824'"),
    "alignment 24": (GGUFBytes(pairs=[pair("general.alignment", U32, u32(24))]), "accepted: a power of two from 8"),
    "alignment 0": (GGUFBytes(pairs=[pair("general.alignment", U32, u32(0))]), "general.alignment is '0'"),
    "alignment of text": (GGUFBytes(pairs=[pair("general.alignment", STRING, text("32"))]), "general.alignment"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_header_is_refused_by_name(tmp_path: Path, case: str) -> None:
    content, message = BROKEN[case]
    path = write(tmp_path, content.build())
    with pytest.raises(WeightsError, match=message) as caught:
        GGUFFile.open(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 500 + len(str(path))


def test_a_file_cut_at_any_byte_is_refused(tmp_path: Path) -> None:
    pairs = [pair("general.architecture", STRING, text("llama")), pair("t", ARRAY, array(STRING, 2, text("a") * 2))]
    whole = GGUFBytes(pairs=pairs).build()
    GGUFFile.open(write(tmp_path, whole))
    for length in range(len(whole)):
        with pytest.raises(WeightsError, match=r"cut off|header needs"):
            GGUFFile.open(write(tmp_path, whole[:length]))


def test_random_damage_never_raises_anything_else(tmp_path: Path) -> None:
    whole = np.frombuffer(GGUFBytes(tensors=[tensor("w", (8,), F32)]).build(), np.uint8)
    rng = np.random.default_rng(0)
    outcomes: list[Any] = []
    for _ in range(500):
        damaged = whole.copy()
        damaged[rng.integers(0, len(whole), 3)] = rng.integers(0, 256, 3)
        try:
            GGUFFile.open(write(tmp_path, damaged.tobytes()))
            outcomes.append("sound")
        except WeightsError:
            outcomes.append("refused")
    assert "refused" in outcomes


@pytest.mark.parametrize("name", ["missing.gguf", "folder.gguf"])
def test_what_is_no_file_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder.gguf").mkdir()
    with pytest.raises(WeightsError, match="is not a file"):
        GGUFFile.open(tmp_path / name)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="cut off"):
        GGUFFile.open(write(tmp_path, b""))
