"""KV events on the wire, read by a subscriber that knows nothing of jaxllm: zmq frames and plain msgpack."""

from __future__ import annotations

import contextlib
import json
import logging
import random
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from jaxllm.build import build_parts
from jaxllm.config.engine import EngineArgs
from jaxllm.config.kv_events import KVEventsConfig, endpoint_of
from jaxllm.engine.engine import Engine
from jaxllm.engine.kv_publisher import ZmqPublisher, check_endpoints
from jaxllm.engine.parts import CoreParts
from jaxllm.errors import ConfigError
from jaxllm.memory.manager import KVManager
from jaxllm.types.kv_events import CacheCleared, KVEvent, PageRemoved, PagesStored
from jaxllm.types.sampling import SamplingParams
from tests.helpers.scripted_engine import Settings, make_parts, scripted

ONE, TWO, THREE = (bytes([n]) * 32 for n in (1, 2, 3))
STORED = PagesStored(0, (TWO, THREE), ONE, tuple(range(8)), 4)
WAIT_MS = 10_000


class Context:
    """Where sockets come from that live as long as the test."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []

    def socket(self, kind: int) -> zmq.Socket[bytes]:
        self._sockets.append(self._context.socket(kind))
        return self._sockets[-1]

    def close(self) -> None:
        self._context.destroy(linger=0)


class Subscriber:
    def __init__(self, context: Context, address: str, topic: bytes = b"", *, listen: bool = False) -> None:
        self._socket = context.socket(zmq.SUB)
        self._socket.subscribe(topic)
        (self._socket.bind if listen else self._socket.connect)(address)

    def frames(self, timeout_ms: int = WAIT_MS) -> list[bytes]:
        assert self._socket.poll(timeout_ms), "nothing was published"
        return self._socket.recv_multipart()

    def batch(self) -> Any:
        return msgspec.msgpack.decode(self.frames()[2])

    def wait_for(self, publisher: ZmqPublisher) -> int:
        """Publish until something arrives, since a subscription takes a while; how often that was."""
        deadline = time.monotonic() + WAIT_MS / 1000
        number = 0
        while time.monotonic() < deadline:
            publisher.publish([CacheCleared()])
            number += 1
            if self._socket.poll(20):
                last = -1
                while last < number - 1:
                    last = int.from_bytes(self.frames()[1], "big")
                return number
        raise AssertionError("nothing was published")


@pytest.fixture
def context() -> Iterator[Context]:
    with closing(Context()) as made:
        yield made


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/e"


def config(address: str, **more: Any) -> KVEventsConfig:
    return KVEventsConfig(enable_kv_cache_events=True, endpoint=address, **more)


def publish(context: Context, settings: KVEventsConfig, *events: KVEvent, rank: int = 0) -> tuple[list[bytes], Any]:
    """The frames of a batch of `events`, and what the last one says."""
    publisher = ZmqPublisher(settings, ("full_attention", None), rank, wall_s=lambda: 1234.5)
    subscriber = Subscriber(context, endpoint_of(settings.endpoint, rank))
    subscriber.wait_for(publisher)
    publisher.publish(events)
    frames = subscriber.frames()
    publisher.close()
    return frames, msgspec.msgpack.decode(frames[2])


def test_a_batch_is_an_array_of_time_events_and_rank(context: Context, address: str) -> None:
    frames, batch = publish(context, config(address, topic="kv@me"), STORED, rank=3)
    assert frames[0] == b"kv@me"
    assert len(frames[1]) == 8
    assert (batch[0], len(batch[1]), batch[2], len(batch)) == (1234.5, 1, 3, 3)


def test_a_stored_run_is_a_map_with_vllms_names(context: Context, address: str) -> None:
    _, batch = publish(context, config(address), STORED)
    assert batch[1] == [
        {
            "type": "BlockStored",
            "block_hashes": [0x0202020202020202, 0x0303030303030303],
            "parent_block_hash": 0x0101010101010101,
            "token_ids": [0, 1, 2, 3, 4, 5, 6, 7],
            "block_size": 4,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": [None, None],
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }
    ]


def test_hashes_are_the_last_64_bits_big_endian_or_all_bytes(context: Context, address: str) -> None:
    digest = bytes(range(32))
    first = PagesStored(0, (digest,), None, (1,), 1)
    _, batch = publish(context, config(address), first)
    assert batch[1][0]["block_hashes"] == [0x18191A1B1C1D1E1F]
    assert batch[1][0]["parent_block_hash"] is None
    _, batch = publish(context, config(address, int_block_hashes=False), first, PageRemoved(0, digest))
    assert (batch[1][0]["block_hashes"], batch[1][1]["block_hashes"]) == ([digest], [digest])


def test_positional_events_have_vllms_old_order(context: Context, address: str) -> None:
    settings = config(address, positional_events=True, int_block_hashes=False)
    adapted = PagesStored(0, (ONE,), None, (5, 6), 2, "poet", (("poet", ("cat", -1), "salt"),))
    _, batch = publish(context, settings, STORED, adapted, PageRemoved(0, ONE), CacheCleared())
    assert batch[1] == [
        ["BlockStored", [TWO, THREE], ONE, [*range(8)], 4, None, "GPU", None, [None, None], 0, "full_attention"],
        [
            "BlockStored",
            [ONE],
            None,
            [5, 6],
            2,
            None,
            "GPU",
            "poet",
            [["poet", ["cat", -1], "salt"]],
            0,
            "full_attention",
        ],
        ["BlockRemoved", [ONE], "GPU", 0],
        ["AllBlocksCleared"],
    ]


def test_removals_in_a_row_are_one_event_a_group(context: Context, address: str) -> None:
    removals = [PageRemoved(0, ONE), PageRemoved(0, TWO), PageRemoved(1, ONE)]
    _, batch = publish(context, config(address), *removals, STORED, PageRemoved(0, THREE), CacheCleared())
    told = [(e["type"], e.get("block_hashes"), e.get("group_idx"), e.get("medium")) for e in batch[1]]
    one, two, three = (int.from_bytes(digest[:8], "big") for digest in (ONE, TWO, THREE))
    assert told == [
        ("BlockRemoved", [one, two], 0, "GPU"),
        ("BlockRemoved", [one], 1, "GPU"),
        ("BlockStored", [two, three], 0, "GPU"),
        ("BlockRemoved", [three], 0, "GPU"),
        ("AllBlocksCleared", None, None, None),
    ]


def test_half_a_surrogate_pair_in_a_salt_holds_nothing_up(context: Context, address: str) -> None:
    salted = PagesStored(0, (ONE,), None, (5,), 1, None, (("\ud800",),))
    _, batch = publish(context, config(address), salted)
    assert batch[1][0]["extra_keys"] == [["\\ud800"]]


def ask_again(context: Context, address: str, first: int) -> list[list[bytes]]:
    """What the replay endpoint answers to (empty, first number), up to and with the end mark."""
    dealer = context.socket(zmq.DEALER)
    dealer.connect(address)
    dealer.send_multipart([b"no request"])  # is passed over
    dealer.send_multipart([b"", first.to_bytes(8, "big")])
    answers: list[list[bytes]] = []
    while not answers or answers[-1][1] != b"\xff" * 8:
        assert dealer.poll(WAIT_MS), "the answer has no end"
        answers.append(dealer.recv_multipart())
    return answers


def test_missed_batches_are_repeated_from_a_number_on(context: Context, address: str) -> None:
    publisher = ZmqPublisher(config(address, replay_endpoint=address + "r", buffer_steps=6))
    for page in range(10):
        publisher.publish([PageRemoved(0, bytes([page]) * 32)])
    deadline = time.monotonic() + 10
    while len(found := ask_again(context, address + "r", 7)) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [int.from_bytes(number, "big", signed=True) for _, number, _ in found] == [7, 8, 9, -1]
    assert found[-1] == [b"", b"\xff" * 8, b""]
    payloads = [msgspec.msgpack.decode(payload) for _, _, payload in found[:-1]]
    assert [batch[1][0]["block_hashes"] for batch in payloads] == [
        [0x0707070707070707 + n * (2**64 // 255)] for n in range(3)
    ]
    kept = [int.from_bytes(number, "big", signed=True) for _, number, _ in ask_again(context, address + "r", 0)]
    assert kept == [4, 5, 6, 7, 8, 9, -1]  # the last six
    publisher.close()


def test_a_full_queue_drops_counts_and_leaves_a_gap(
    context: Context, address: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = ZmqPublisher(config(address, max_queue_size=2))
    subscriber = Subscriber(context, address)
    num_before = subscriber.wait_for(publisher)
    encode, may_go, is_held = publisher._encoder.batch, threading.Event(), threading.Event()  # pyright: ignore[reportPrivateUsage]

    def held(*args: Any) -> bytes:
        is_held.set()
        may_go.wait(10)
        return encode(*args)

    monkeypatch.setattr(publisher._encoder, "batch", held)  # pyright: ignore[reportPrivateUsage]
    with caplog.at_level(logging.WARNING):
        publisher.publish([CacheCleared()])
        assert is_held.wait(10)
        started = time.monotonic()
        for _ in range(7):  # 2 find room
            publisher.publish([CacheCleared()])
        assert time.monotonic() - started < 5  # nobody was waited for
    may_go.set()
    assert publisher.num_dropped == 5
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        f"core 0 dropped {n} batches of KV events" for n in (1, 2, 4)
    ]
    for _ in range(3):
        subscriber.frames()
    publisher.publish([STORED])
    assert int.from_bytes(subscriber.frames()[1], "big") == num_before + 8
    publisher.close()


def test_what_cannot_be_written_costs_its_own_batch_alone(
    context: Context, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = ZmqPublisher(config(address))
    subscriber = Subscriber(context, address)
    num_before = subscriber.wait_for(publisher)
    with caplog.at_level(logging.ERROR):
        publisher.publish([PagesStored(0, (ONE,), None, (2**70,), 1)])
        publisher.publish([STORED])
        assert int.from_bytes(subscriber.frames()[1], "big") == num_before + 1
    assert f"batch {num_before} of the KV events of core 0 cannot be written" in caplog.text
    publisher.close()


def test_what_is_queued_is_sent_before_closing_ends(context: Context, address: str) -> None:
    publisher = ZmqPublisher(config(address))
    subscriber = Subscriber(context, address)
    num_before = subscriber.wait_for(publisher)
    for _ in range(100):
        publisher.publish([STORED])
    publisher.close()
    publisher.close()
    publisher.publish([STORED])  # dropped
    numbers = [int.from_bytes(subscriber.frames()[1], "big") for _ in range(100)]
    assert numbers == list(range(num_before, num_before + 100))


def free_port() -> int:
    """Free like the two after it, and none that the system gives to connections."""
    for port in random.sample(range(20_000, 30_000, 3), 1000):
        with contextlib.suppress(OSError), contextlib.ExitStack() as held:
            for each in range(port, port + 3):
                held.enter_context(socket.socket()).bind(("", each))
            return port
    raise AssertionError("no three free ports in a row")


def test_an_address_with_a_host_is_connected_to(context: Context) -> None:
    port = free_port()
    subscriber = Subscriber(context, f"tcp://*:{port}", listen=True)
    publisher = ZmqPublisher(config(f"tcp://127.0.0.1:{port}"))
    subscriber.wait_for(publisher)
    publisher.close()


def test_a_port_in_use_is_refused_before_anything_is_loaded() -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        settings = json.dumps({"enable_kv_cache_events": True, "endpoint": f"tcp://*:{port}"})
        with pytest.raises(
            ConfigError, match=rf"endpoint='tcp://\*:{port}' cannot be opened: Address already in use; acc"
        ):
            build_parts(EngineArgs(model="no-such-model", kv_events_config=settings))


def test_cores_whose_addresses_meet_are_refused() -> None:
    port = free_port()
    settings = config(f"tcp://*:{port}", replay_endpoint=f"tcp://*:{port + 1}")
    for _ in range(3):  # trying leaves the addresses free
        check_endpoints(settings, 1)
    with pytest.raises(ConfigError, match=f"endpoint='tcp://.*:{port + 1}' cannot be opened: Address already in use"):
        check_endpoints(settings, 2)


@pytest.mark.parametrize(
    ("endpoint", "second"),
    [
        ("tcp://*:5557", "tcp://*:5559"),
        ("tcp://[::1]:80", "tcp://[::1]:82"),
        ("inproc://kv", "inproc://kv_dp2"),
        ("ipc:///tmp/kv", "ipc:///tmp/kv_dp2"),
    ],
)
def test_each_core_has_an_address_of_its_own(endpoint: str, second: str) -> None:
    assert (endpoint_of(endpoint, 0), endpoint_of(endpoint, 2)) == (endpoint, second)


def test_without_pyzmq_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(ConfigError, match=r"kv_events_config needs pyzmq.*pip install jaxllm\[kv-events\]"):
        build_parts(EngineArgs(model="no-such-model", kv_events_config='{"enable_kv_cache_events": true}'))


class Cache:
    """What a router would believe a core has."""

    def __init__(self) -> None:
        self.known: set[bytes] = set()
        self.kinds: set[str] = set()

    def hear(self, events: list[Any]) -> None:
        for event in events:
            self.kinds.add(event["type"])
            hashes = set(event.get("block_hashes", ()))
            if event["type"] == "BlockStored":
                assert not hashes & self.known
                self.known |= hashes
            elif event["type"] == "BlockRemoved":
                assert hashes <= self.known
                self.known -= hashes
            else:
                self.known.clear()


def found_by(kv: KVManager) -> set[bytes]:
    return set(kv._pools[0]._index)  # pyright: ignore[reportPrivateUsage]


def test_a_reader_of_an_engines_events_knows_its_cache(context: Context, tmp_path: Path, address: str) -> None:
    script = tmp_path / "script.json"
    script.write_text('{"default": {"text": " one two", "repeat": true}, "max_model_len": 256}')
    settings = {"enable_kv_cache_events": True, "endpoint": address, "replay_endpoint": address + "r"}
    text = json.dumps(settings | {"int_block_hashes": False})
    args = EngineArgs(executor=f"scripted:{script}", num_pages=24, page_size=4, kv_events_config=text)
    parts = build_parts(args)
    with Engine(parts) as engine:
        for number in range(30):  # of which few pages fit, so that many are removed
            engine.generate([f"{number % 7} is the number", "as before"], [SamplingParams(max_tokens=9 + number)] * 2)
        assert engine.reset_prefix_cache()
        engine.generate(["once more, from the beginning"], [SamplingParams(max_tokens=30)])
        deadline = time.monotonic() + 10
        while True:  # the last batches may be on their way
            cache, batches = Cache(), ask_again(context, address + "r", 0)[:-1]
            for _, _, payload in batches:
                cache.hear(msgspec.msgpack.decode(payload)[1])
            if (parts.kv.usage == 0 and cache.known == found_by(parts.kv)) or time.monotonic() > deadline:
                break
    assert cache.known == found_by(parts.kv)
    assert len(cache.known) > 5
    assert cache.kinds == {"BlockStored", "BlockRemoved", "AllBlocksCleared"}
    assert [int.from_bytes(number, "big") for _, number, _ in batches] == list(range(len(batches)))


def test_every_core_tells_of_its_own_cache(context: Context, address: str) -> None:
    publishers = [ZmqPublisher(config(address, replay_endpoint=address + "r"), rank=rank) for rank in range(2)]
    first, second = [make_parts(scripted(), kv_events=publisher) for publisher in publishers]
    other = CoreParts(executor=second.executor, scheduler=second.scheduler, kv=second.kv, kv_events=second.kv_events)
    with Engine(replace(first, more_cores=(other,))) as engine:
        engine.generate([f"prompt number {n}" for n in range(8)], [SamplingParams(max_tokens=5)] * 8)
        for rank in range(2):
            batches = []
            deadline = time.monotonic() + 10
            while not batches and time.monotonic() < deadline:
                batches = ask_again(context, endpoint_of(address + "r", rank), 0)[:-1]
            told = [msgspec.msgpack.decode(payload) for _, _, payload in batches]
            assert {batch[2] for batch in told} == {rank}
            stored = [tuple(event["token_ids"]) for _, events, _ in told for event in events]
            assert len(stored) == len(set(stored)) >= 4


class Remembering:
    """A publisher that says when it was told of what."""

    def __init__(self) -> None:
        self.told: list[tuple[int, list[KVEvent]]] = []  # steps collected until then
        self.num_collected = 0
        self.is_closed = False

    def publish(self, events: Sequence[KVEvent]) -> None:
        self.told.append((self.num_collected, [*events]))

    def close(self) -> None:
        self.is_closed = True


def test_a_core_tells_of_a_prompt_before_its_step_ends_and_closes_the_publisher() -> None:
    publisher = Remembering()
    executor = scripted()
    collect = executor.collect

    def counted(ticket: Any) -> Any:
        publisher.num_collected += 1
        return collect(ticket)

    executor.collect = counted
    with Engine(make_parts(executor, Settings(async_scheduling=False), kv_events=publisher)) as engine:
        engine.generate(["a prompt of several pages"], [SamplingParams(max_tokens=5)])
        assert engine.reset_prefix_cache()
    steps, events = publisher.told[0]
    assert steps == 0
    assert [type(event) for event in events] == [PagesStored]
    assert publisher.told[-1][1] == [CacheCleared()]
    assert publisher.is_closed


def test_an_engine_without_the_flag_has_no_publisher() -> None:
    parts = make_parts(scripted())
    assert parts.kv_events is None
    with Engine(parts) as engine:
        engine.generate(["a prompt of pages"], [SamplingParams(max_tokens=5)])
    assert parts.kv.take_events() == []
