"""KV events on the wire: msgpack in the shape of vLLM's, so that its subscribers and routers read them.

A batch is an array (time, events, rank of the core); an event is a map with its name under "type", or,
with `positional_events`, an array that begins with its name. A page is called a block there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import msgspec

from jaxllm.memory.plan import KVCachePlan
from jaxllm.memory.spec import FullKV
from jaxllm.types.kv_events import ExtraKeys, KVEvent, PageRemoved, PagesStored

_MEDIUM = "GPU"  # the device's memory, of whatever make: the word that subscribers know
_KINDS: dict[type, str] = {FullKV: "full_attention"}

Hash = int | bytes


class KVEventPublisher(Protocol):
    """Hears from one core's thread what happened to its pages. It does not raise, and it does not wait."""

    def publish(self, events: Sequence[KVEvent]) -> None: ...

    def close(self) -> None:
        """Send what is left. Safe to call twice; what comes after it is dropped."""
        ...


class BlockStored(msgspec.Struct, frozen=True, tag="BlockStored", omit_defaults=True):
    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: tuple[int, ...]
    block_size: int
    lora_id: int | None  # adapters have names here
    medium: str | None
    lora_name: str | None
    extra_keys: Sequence[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(msgspec.Struct, frozen=True, tag="BlockRemoved", omit_defaults=True):
    block_hashes: list[Hash]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag="AllBlocksCleared"):
    pass


class PositionalStored(BlockStored, frozen=True, tag="BlockStored", array_like=True):
    pass


class PositionalRemoved(BlockRemoved, frozen=True, tag="BlockRemoved", array_like=True):
    pass


class PositionalCleared(AllBlocksCleared, frozen=True, tag="AllBlocksCleared", array_like=True):
    pass


class EventBatch(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    ts: float  # seconds since 1970
    events: list[Any]
    data_parallel_rank: int | None = None


class WireEncoder:
    """Events of one core as the bytes of a batch."""

    def __init__(self, kinds: Sequence[str | None], rank: int, *, int_hashes: bool, positional: bool) -> None:
        """`kinds`: of the KV groups, in their order."""
        self._kinds = tuple(kinds)
        self._rank = rank
        self._hash = _low_64_bits if int_hashes else _whole
        self._stored = PositionalStored if positional else BlockStored
        self._removed = PositionalRemoved if positional else BlockRemoved
        self._cleared = PositionalCleared if positional else AllBlocksCleared
        self._encode = msgspec.msgpack.Encoder().encode

    def batch(self, events: Sequence[KVEvent], ts: float) -> bytes:
        return self._encode(EventBatch(ts, list(self._blocks(events)), self._rank))

    def _blocks(self, events: Sequence[KVEvent]) -> Iterator[msgspec.Struct]:
        """Removals in a row become one event."""
        removed: list[Hash] = []
        group = 0
        for event in events:
            is_removal = isinstance(event, PageRemoved)
            if removed and not (is_removal and event.group == group):
                yield self._removed(removed, _MEDIUM, group)
                removed = []
            if is_removal:
                group = event.group
                removed.append(self._hash(event.digest))
            else:
                yield self._block_stored(event) if isinstance(event, PagesStored) else self._cleared()
        if removed:
            yield self._removed(removed, _MEDIUM, group)

    def _block_stored(self, event: PagesStored) -> BlockStored:
        num_pages = len(event.digests)
        return self._stored(
            block_hashes=[self._hash(digest) for digest in event.digests],
            parent_block_hash=None if event.parent is None else self._hash(event.parent),
            token_ids=event.token_ids,
            block_size=event.page_size,
            lora_id=None,
            medium=_MEDIUM,
            lora_name=None if event.adapter_id is None else _encodable(event.adapter_id),
            extra_keys=[None] * num_pages if event.extra_keys is None else [_keys(keys) for keys in event.extra_keys],
            group_idx=event.group,
            kv_cache_spec_kind=self._kinds[event.group],
        )


def kinds_of(plan: KVCachePlan) -> tuple[str | None, ...]:
    """vLLM's names for what the layers of each group keep; None where it has none."""
    return tuple(_KINDS.get(type(group.spec)) for group in plan.groups)


def _low_64_bits(digest: bytes) -> int:
    return int.from_bytes(digest[-8:], "big")


def _whole(digest: bytes) -> bytes:
    return digest


def _keys(keys: ExtraKeys) -> tuple[Any, ...] | None:
    return tuple(_encodable(key) if isinstance(key, str) else (_encodable(key[0]), key[1]) for key in keys) or None


def _encodable(text: str) -> str:
    """A salt may hold half a surrogate pair, which no UTF-8 does."""
    return text.encode("utf-8", "backslashreplace").decode()
