"""A request for n sequences becomes n requests of one, which share the prompt."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import msgspec

from jaxllm.engine.messages import AddRequest


def split_siblings(message: AddRequest, core_id: str) -> tuple[AddRequest, ...]:
    """The sequences of a request as the core takes them: the first is called `core_id`, the i-th `core_id`/i.

    Each has a seed of its own, made from the request's alone; only the first scores the prompt.
    """
    params = message.params
    if params.n == 1:
        return (msgspec.structs.replace(message, request_id=core_id),)
    first = replace(params, n=1)
    other = first if params.prompt_logprobs is None else replace(first, prompt_logprobs=None)
    siblings = [msgspec.structs.replace(message, request_id=core_id, params=first)]
    siblings += [
        msgspec.structs.replace(
            message,
            request_id=f"{core_id}/{index}",
            params=other,
            seed=sibling_seed(message.seed, index),
            fork_of=core_id,
        )
        for index in range(1, params.n)
    ]
    return tuple(siblings)


def sibling_seed(seed: int, index: int) -> int:
    """The seed of the sequence at `index`: the request's own for the first, else 63 bits mixed from both."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
