"""GGUF files put together byte by byte, so that a test can break any one of the bytes."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

U32, STRING, ARRAY = 4, 8, 9
F32, Q4_1, Q8_0 = 0, 3, 8


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def array(kind: int, count: int, items: bytes) -> bytes:
    return struct.pack("<IQ", kind, count) + items


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def tensor(name: str, dims: tuple[int, ...], kind: int = F32, offset: int = 0, num_dims: int | None = None) -> bytes:
    count = len(dims) if num_dims is None else num_dims
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", count, *dims, kind, offset)


@dataclass
class GGUFBytes:
    """The parts of a file; the default is a sound one with one float32 tensor of 8."""

    pairs: list[bytes] = field(default_factory=lambda: [pair("general.architecture", STRING, text("llama"))])
    tensors: list[bytes] = field(default_factory=lambda: [tensor("w", (8,))])
    data: bytes = b"\0" * 32
    magic: bytes = b"GGUF"
    version: int = 3
    num_pairs: int | None = None
    num_tensors: int | None = None
    alignment: int = 32

    def header(self) -> bytes:
        num_tensors = len(self.tensors) if self.num_tensors is None else self.num_tensors
        num_pairs = len(self.pairs) if self.num_pairs is None else self.num_pairs
        counts = struct.pack("<IQQ", self.version, num_tensors, num_pairs)
        return self.magic + counts + b"".join(self.pairs) + b"".join(self.tensors)

    def build(self) -> bytes:
        header = self.header()
        return header + b"\0" * (-len(header) % self.alignment) + self.data
