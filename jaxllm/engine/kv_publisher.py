"""Publishes KV events over ZeroMQ, and never holds the core up."""

from __future__ import annotations

import contextlib
import importlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from jaxllm.config.kv_events import KVEventsConfig, binds, endpoint_of
from jaxllm.engine.kv_events import WireEncoder
from jaxllm.errors import ConfigError
from jaxllm.types.kv_events import KVEvent

_log = logging.getLogger("jaxllm.engine")

_REPLAY_POLL_S = 0.05  # how long somebody who asks for missed batches may wait while nothing is published
_JOIN_S = 5.0  # how long closing waits for what is queued
_LINGER_MS = 1000  # and for what subscribers are to be sent
_END = (-1).to_bytes(8, "big", signed=True)  # sequence number of the frame that ends a replay

_Batch = tuple[int, float, Sequence[KVEvent]]  # sequence number, time, what happened


class ZmqPublisher:
    """A `KVEventPublisher` with a thread and sockets of its own. Mutable; told by one core's thread.

    A message is (topic, sequence number, batch), the number as 8 bytes, big-endian. Whoever sees a gap
    can ask the replay endpoint from a number on. Batches that were dropped count in the numbers, so
    that they leave a gap too: one that cannot be filled, after which nothing about this core is sure.
    """

    def __init__(
        self,
        config: KVEventsConfig,
        kinds: Sequence[str | None] = (None,),
        rank: int = 0,
        *,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        """`kinds`: see `WireEncoder`. `rank`: number of the core, which its addresses and batches carry.

        Raises:
            ConfigError: an address cannot be had, or pyzmq is not installed.
        """
        zmq = _import_zmq()
        self._encoder = WireEncoder(
            kinds, rank, int_hashes=config.int_block_hashes, positional=config.positional_events
        )
        self._rank = rank
        self._wall_s = wall_s
        self._topic = config.topic.encode("utf-8", "backslashreplace")
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._queue: queue.Queue[_Batch | None] = queue.Queue(config.max_queue_size)
        self._next_number = 0
        self._num_dropped = 0
        self._is_open = True
        # The process's context: a subscriber in this process finds inproc addresses by it.
        self._publisher, self._replay = _open_sockets(zmq, zmq.Context.instance(), config, rank)
        self._thread = threading.Thread(target=self._run, name=f"jaxllm-kv-events-{rank}", daemon=True)
        self._thread.start()

    @property
    def num_dropped(self) -> int:
        """Batches that nobody will see, since the queue was full."""
        return self._num_dropped

    def publish(self, events: Sequence[KVEvent]) -> None:
        if not self._is_open:
            return
        number, self._next_number = self._next_number, self._next_number + 1
        try:
            self._queue.put_nowait((number, self._wall_s(), events))
        except queue.Full:
            self._num_dropped = dropped = self._num_dropped + 1
            if dropped & (dropped - 1) == 0:  # 1, 2, 4 ...: a stuck publisher does not fill the log
                _log.warning(
                    "core %d dropped %d batches of KV events: %s wait", self._rank, dropped, self._queue.maxsize
                )

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            with contextlib.suppress(queue.Full):  # then the thread looks by itself once it has caught up
                self._queue.put_nowait(None)
        self._thread.join(_JOIN_S)

    # The thread

    def _run(self) -> None:
        try:
            while self._is_open or not self._queue.empty():
                if self._replay is not None and self._replay.poll(0):
                    self._answer(self._replay)
                self._send_next()
        except Exception as error:  # of a socket: what encodes badly is told by `_send_next`
            _log.error("the KV events of core %d end", self._rank, exc_info=error)
        finally:
            self._is_open = False
            self._publisher.close(linger=_LINGER_MS)
            if self._replay is not None:
                self._replay.close(linger=_LINGER_MS)

    def _send_next(self) -> None:
        try:
            batch = self._queue.get(timeout=None if self._replay is None else _REPLAY_POLL_S)
        except queue.Empty:
            return
        if batch is None:
            return
        number, ts, events = batch
        try:
            payload = self._encoder.batch(events, ts)
        except Exception as error:
            _log.error("batch %d of the KV events of core %d cannot be written", number, self._rank, exc_info=error)
            return
        self._kept.append((number, payload))
        self._publisher.send_multipart((self._topic, number.to_bytes(8, "big"), payload))

    def _answer(self, replay: Any) -> None:
        frames = replay.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            return  # no request; who sends such things gets no line in the log for it
        client, empty, first = frames
        for number, payload in self._kept:
            if number >= int.from_bytes(first, "big"):
                replay.send_multipart((client, empty, number.to_bytes(8, "big"), payload))
        replay.send_multipart((client, empty, _END, b""))


def check_endpoints(config: KVEventsConfig, num_cores: int) -> None:
    """Try the addresses of all cores, before anything takes time.

    Raises:
        ConfigError: one cannot be had, or pyzmq is not installed.
    """
    zmq = _import_zmq()
    context = zmq.Context()
    opened: list[Any] = []
    try:
        for rank in range(num_cores):
            opened += _open_sockets(zmq, context, config, rank)
    finally:
        for socket in opened:
            if socket is not None:
                socket.close(linger=0)
        context.term()  # returns once the addresses are free again


def _import_zmq() -> Any:
    try:
        return importlib.import_module("zmq")
    except ImportError as error:
        raise ConfigError(
            f"kv_events_config needs pyzmq, which cannot be imported ({error}); "
            "accepted after: pip install jaxllm[kv-events]"
        ) from None


def _open_sockets(zmq: Any, context: Any, config: KVEventsConfig, rank: int) -> tuple[Any, Any]:
    """The PUB socket of a core, and the ROUTER socket of its replay, or None."""
    publisher = _open(zmq, context, zmq.PUB, "endpoint", endpoint_of(config.endpoint, rank), config.hwm)
    if config.replay_endpoint is None:
        return publisher, None
    try:
        # All that is kept fits on the way to one who asks; who asks again without reading misses some.
        address = endpoint_of(config.replay_endpoint, rank)
        return publisher, _open(zmq, context, zmq.ROUTER, "replay_endpoint", address, config.buffer_steps + 1)
    except ConfigError:
        publisher.close(linger=0)
        raise


def _open(zmq: Any, context: Any, kind: int, name: str, address: str, hwm: int) -> Any:
    socket = context.socket(kind)
    socket.set_hwm(hwm)
    socket.set(zmq.IPV6, int("[" in address))
    try:
        if kind == zmq.ROUTER or binds(address):
            socket.bind(address)
        else:
            socket.connect(address)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        raise ConfigError(
            f"kv_events_config: {name}={address!r} cannot be opened: {zmq.strerror(error.errno)}; "
            "accepted: an address that nothing else uses, and as many counted up from it as there are cores"
        ) from None
    return socket
