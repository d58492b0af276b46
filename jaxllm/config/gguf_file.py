"""GGUF files: a bounded reader of the header, for files that may be cut off, broken or hostile.

Nothing in the file is believed before it is checked against the bytes that remain: no count,
length, dimension or offset can make this reader allocate or loop beyond the limits below.

Layout: magic, version, counts, key-value pairs, tensor infos, padding, tensor data
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). Versions 2 and 3, little-endian.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from jaxllm.errors import WeightsError

MAX_HEADER_BYTES = 32 * 2**20  # the largest known vocabularies with merges take 16 MiB
# In all arrays of a file together. The largest known vocabulary has 0.8 Mi strings and 0.5 Mi numbers.
MAX_STRINGS = 2**20
MAX_NUMBERS = 2**20
MAX_PAIRS = 2**16
MAX_TENSORS = 2**17
MAX_ALIGNMENT = 2**16
MAX_KEY_BYTES = 2**16 - 1  # the specification's limit
MAX_TENSOR_NAME_BYTES = 64  # the specification's limit
MAX_DIMS = 4

_MAGIC = b"GGUF"
_PREFIX = struct.Struct("<4sIQQ")  # magic, version, tensors, pairs
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_MIN_PAIR_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8

# Value types by their number in the file.
_BOOL, _STRING, _ARRAY = 7, 8, 9
_SCALARS = {
    number: (struct.Struct("<" + code), np.dtype(name).newbyteorder("<"))
    for number, code, name in (
        (0, "B", "u1"),
        (1, "b", "i1"),
        (2, "H", "u2"),
        (3, "h", "i2"),
        (4, "I", "u4"),
        (5, "i", "i4"),
        (6, "f", "f4"),
        (_BOOL, "B", "u1"),
        (10, "Q", "u8"),
        (11, "q", "i8"),
        (12, "d", "f8"),
    )
}


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where a tensor lies. `shape` is in numpy's order: the last axis is contiguous, as in (out, in)."""

    name: str
    shape: tuple[int, ...]
    type: str  # ggml's name of the block type: "F32", "Q4_1", …
    offset: int  # from the beginning of the file, bytes
    num_bytes: int


class GGUFFile:
    """An opened GGUF file. Immutable; the file stays mapped as long as the object or a view lives."""

    def __init__(self, path: Path, buffer: mmap.mmap, metadata: dict[str, Any], tensors: dict[str, GGUFTensor]) -> None:
        self.path = path
        self.metadata = metadata  # str, int, float, bool, or a list of one of those
        self.tensors = tensors
        self._buffer = buffer

    @classmethod
    def open(cls, path: str | Path) -> GGUFFile:
        """Map a file and read its header.

        Raises:
            WeightsError: the file cannot be read, or breaks the format or the limits of this
                module; the message names the file, the field and the value.
        """
        path = Path(path)
        buffer = _map(path)
        cursor = _Cursor(path, buffer)
        num_tensors, num_pairs = _read_prefix(cursor)
        metadata = _read_metadata(cursor, num_pairs)
        infos = _read_tensor_infos(cursor, num_tensors)
        tensors = _place_tensors(cursor, infos, _alignment(cursor, metadata))
        return cls(path, buffer, metadata, tensors)

    def data(self, name: str) -> npt.NDArray[np.uint8]:
        """The bytes of a tensor as a read-only view of the mapped file, uint8 [num_bytes]."""
        tensor = self.tensors[name]
        return np.frombuffer(self._buffer, np.uint8, tensor.num_bytes, tensor.offset)


def _map(path: Path) -> mmap.mmap:
    try:
        if not path.is_file():
            raise WeightsError(f"{path} is not a file")
        with path.open("rb") as file:
            if path.stat().st_size < _PREFIX.size:
                raise WeightsError(f"{path} is cut off: a GGUF file has at least {_PREFIX.size} bytes")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise WeightsError(f"{path}: cannot read the file: {error}") from error


def _shown(text: str) -> str:
    """A name from the file for a message: quoted, escaped, short."""
    return repr(text if len(text) <= 80 else text[:77] + "...")


class _Cursor:
    """Reads forward through the header, never past its end. Owned by `GGUFFile.open`."""

    def __init__(self, path: Path, buffer: mmap.mmap) -> None:
        self.path = path
        self.buffer = buffer
        self.size = len(buffer)
        self.end = min(self.size, MAX_HEADER_BYTES)
        self.position = 0
        self.num_strings = 0  # in the arrays so far
        self.num_numbers = 0

    def fail(self, text: str) -> NoReturn:
        raise WeightsError(f"{self.path}: {text}")

    def require(self, num_bytes: int, what: str) -> None:
        """Check that `num_bytes` more bytes of the header are there."""
        remaining = self.end - self.position
        if num_bytes <= remaining:
            return
        if self.end < self.size:
            self.fail(f"{what} needs {num_bytes} bytes at {self.position}; a header has at most {self.end} bytes")
        self.fail(
            f"{what} needs {num_bytes} bytes at {self.position} and {remaining} are left: the file is cut off or broken"
        )

    def take(self, format: struct.Struct, what: str) -> Any:
        self.require(format.size, what)
        (value,) = format.unpack_from(self.buffer, self.position)
        self.position += format.size
        return value

    def string(self, what: str, max_bytes: int = MAX_HEADER_BYTES) -> str:
        length = self.take(_U64, f"the length of {what}")
        if length > max_bytes:
            self.fail(f"{what} has {length} bytes; accepted: at most {max_bytes}")
        self.require(length, what)
        start = self.position
        self.position += length
        return self.decode(start, self.position, what)

    def decode(self, start: int, stop: int, what: str) -> str:
        try:
            return self.buffer[start:stop].decode()
        except UnicodeDecodeError as error:
            self.fail(f"{what} at {start} is not UTF-8: {error.reason}")

    def strings(self, count: int, what: str) -> list[str]:
        """`count` strings; the lengths are walked inline, vocabularies have hundreds of thousands."""
        self.require(8 * count, what)
        buffer, end, position = self.buffer, self.end, self.position
        items: list[str] = []
        try:
            for _ in range(count):
                start = position + 8
                position = start + _U64.unpack_from(buffer, position)[0]
                if position > end:
                    break
                items.append(buffer[start:position].decode())
        except struct.error:
            position = end + 1
        except UnicodeDecodeError as error:
            self.fail(f"{what}[{len(items)}] is not UTF-8: {error.reason}")
        if position > end:
            self.fail(f"{what}[{len(items)}] reaches past the end of the header: the file is cut off or broken")
        self.position = position
        return items


def _read_prefix(cursor: _Cursor) -> tuple[int, int]:
    """Magic, version and counts; returns (tensors, key-value pairs)."""
    magic, version, num_tensors, num_pairs = _PREFIX.unpack_from(cursor.buffer, 0)
    cursor.position = _PREFIX.size
    if magic != _MAGIC:
        cursor.fail(f"the first bytes are {magic!r}, not {_MAGIC!r}: not a GGUF file")
    if version & 0xFFFF == 0:
        cursor.fail("the file is big-endian; accepted: little-endian GGUF")
    if version not in (2, 3):
        cursor.fail(f"GGUF version {version} is not served; accepted: 2, 3")
    if num_pairs > MAX_PAIRS:
        cursor.fail(f"{num_pairs} key-value pairs; accepted: at most {MAX_PAIRS}")
    if num_tensors > MAX_TENSORS:
        cursor.fail(f"{num_tensors} tensors; accepted: at most {MAX_TENSORS}")
    cursor.require(num_pairs * _MIN_PAIR_BYTES + num_tensors * _MIN_TENSOR_BYTES, "the header")
    return num_tensors, num_pairs


def _read_metadata(cursor: _Cursor, num_pairs: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for index in range(num_pairs):
        key = cursor.string(f"key {index}", MAX_KEY_BYTES)
        if key in metadata:
            cursor.fail(f"key {_shown(key)} is there twice")
        kind = cursor.take(_U32, f"the type of {_shown(key)}")
        metadata[key] = _read_value(cursor, kind, _shown(key))
    return metadata


def _read_value(cursor: _Cursor, kind: int, what: str) -> Any:
    if kind == _STRING:
        return cursor.string(what)
    if kind == _ARRAY:
        return _read_array(cursor, what)
    if kind not in _SCALARS:
        cursor.fail(f"{what} has value type {kind}; accepted: 0 to 12")
    value = cursor.take(_SCALARS[kind][0], what)
    if kind != _BOOL:
        return value
    if value > 1:
        cursor.fail(f"{what} is a boolean of value {value}; accepted: 0, 1")
    return bool(value)


def _read_array(cursor: _Cursor, what: str) -> list[Any]:
    kind = cursor.take(_U32, f"the item type of {what}")
    count = cursor.take(_U64, f"the length of {what}")
    if kind == _STRING:
        cursor.num_strings += count
        if cursor.num_strings > MAX_STRINGS:
            cursor.fail(f"{what} has {count} strings; accepted: at most {MAX_STRINGS} in all arrays together")
        return cursor.strings(count, what)
    cursor.num_numbers += count
    if cursor.num_numbers > MAX_NUMBERS:
        cursor.fail(f"{what} has {count} items; accepted: at most {MAX_NUMBERS} in all arrays together")
    if kind not in _SCALARS:
        cursor.fail(f"{what} has items of value type {kind}; accepted: 0 to 8 and 10 to 12")
    dtype = _SCALARS[kind][1]
    cursor.require(count * dtype.itemsize, what)
    values = np.frombuffer(cursor.buffer, dtype, count, cursor.position)
    cursor.position += count * dtype.itemsize
    if kind == _BOOL:
        if count and values.max() > 1:
            cursor.fail(f"{what} is an array of booleans with a value of {values.max()}; accepted: 0, 1")
        values = values.astype(np.bool_)
    return values.tolist()


@dataclass(frozen=True, slots=True)
class _TensorInfo:
    name: str
    shape: tuple[int, ...]
    type: str
    offset: int  # from the beginning of the data
    num_bytes: int


def _read_tensor_infos(cursor: _Cursor, num_tensors: int) -> dict[str, _TensorInfo]:
    layout = _block_layout()
    infos: dict[str, _TensorInfo] = {}
    for index in range(num_tensors):
        name = cursor.string(f"the name of tensor {index}", MAX_TENSOR_NAME_BYTES)
        if name in infos:
            cursor.fail(f"tensor {_shown(name)} is there twice")
        infos[name] = _read_tensor_info(cursor, name, layout)
    return infos


def _block_layout() -> Callable[[int], tuple[str, int, int] | None]:
    """From a block type's number to (name, elements, bytes) of a block; None for unknown ones."""
    from gguf.constants import GGML_QUANT_SIZES

    layouts = {int(kind): (kind.name, *sizes) for kind, sizes in GGML_QUANT_SIZES.items()}
    return layouts.get


def _read_tensor_info(cursor: _Cursor, name: str, layout: Callable[[int], tuple[str, int, int] | None]) -> _TensorInfo:
    what = f"tensor {_shown(name)}"
    num_dims = cursor.take(_U32, f"the number of dimensions of {what}")
    if not 1 <= num_dims <= MAX_DIMS:
        cursor.fail(f"{what} has {num_dims} dimensions; accepted: 1 to {MAX_DIMS}")
    dims = [cursor.take(_U64, f"dimension {axis} of {what}") for axis in range(num_dims)]
    if 0 in dims:
        cursor.fail(f"{what} has dimensions {dims}; accepted: at least 1 each")
    number = cursor.take(_U32, f"the type of {what}")
    offset = cursor.take(_U64, f"the offset of {what}")
    block = layout(number)
    if block is None:
        cursor.fail(f"{what} has block type {number}, which the installed gguf package does not know")
    type_name, block_elements, block_bytes = block
    if dims[0] % block_elements:
        cursor.fail(f"{what} has rows of {dims[0]}; {type_name} comes in blocks of {block_elements}")
    num_bytes = block_bytes * (dims[0] // block_elements)
    for dim in dims[1:]:
        num_bytes *= dim  # Python's integers do not overflow
    if num_bytes > cursor.size:
        cursor.fail(f"{what} of dimensions {dims} takes {num_bytes} bytes and the file has {cursor.size}")
    return _TensorInfo(name, tuple(reversed(dims)), type_name, offset, num_bytes)


def _alignment(cursor: _Cursor, metadata: dict[str, Any]) -> int:
    value = metadata.get("general.alignment", 32)
    is_power = isinstance(value, int) and not isinstance(value, bool) and value > 0 and not value & (value - 1)
    if not is_power or not 8 <= value <= MAX_ALIGNMENT:
        cursor.fail(f"general.alignment is {_shown(str(value))}; accepted: a power of two from 8 to {MAX_ALIGNMENT}")
    return value


def _place_tensors(cursor: _Cursor, infos: dict[str, _TensorInfo], alignment: int) -> dict[str, GGUFTensor]:
    """Check that the tensors are aligned, inside the file and apart from each other."""
    start = -(-cursor.position // alignment) * alignment
    previous_end, previous = start, ""
    for info in sorted(infos.values(), key=lambda info: info.offset):
        what, begin = f"tensor {_shown(info.name)}", start + info.offset
        if info.offset % alignment:
            cursor.fail(f"{what} has offset {info.offset}, which is no multiple of the alignment {alignment}")
        if begin + info.num_bytes > cursor.size:
            cursor.fail(
                f"{what} ends at byte {begin + info.num_bytes} and the file has {cursor.size}: "
                "the file is cut off or broken"
            )
        if begin < previous_end:
            cursor.fail(f"{what} overlaps tensor {_shown(previous)}")
        previous_end, previous = begin + info.num_bytes, info.name
    return {
        info.name: GGUFTensor(info.name, info.shape, info.type, start + info.offset, info.num_bytes)
        for info in infos.values()
    }
