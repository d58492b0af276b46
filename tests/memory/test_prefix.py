from __future__ import annotations

import hashlib
import struct
from itertools import combinations
from typing import Any

from jaxllm.memory.prefix import ROOT_DIGEST, PageHasher, extra_keys
from jaxllm.types.request import Request
from jaxllm.types.sampling import SamplingParams


def digests(tokens: tuple[int, ...], page_size: int = 4, **extra: Any) -> list[bytes]:
    found: list[bytes] = []
    request = Request("r", tokens, SamplingParams(), 0.0, **extra)
    PageHasher(page_size).extend(request, found, [], len(tokens) // page_size)
    return found


TOKENS = tuple(range(12))


def test_a_page_is_named_by_sha256_over_its_parent_and_its_tokens() -> None:
    first = hashlib.sha256(ROOT_DIGEST + struct.pack("<4q", 0, 1, 2, 3)).digest()
    second = hashlib.sha256(first + struct.pack("<4q", 4, 5, 6, 7)).digest()
    assert digests(tuple(range(8))) == [first, second]


def test_equal_tokens_after_a_different_prefix_have_another_name() -> None:
    one, other = digests(TOKENS), digests((99, *TOKENS[1:]))
    assert not set(one) & set(other)
    shared = digests((*TOKENS[:8], 1, 1, 1, 1))
    assert shared[:2] == one[:2]
    assert shared[2] != one[2]


def test_output_tokens_count_like_prompt_tokens_and_digests_grow_by_what_is_new() -> None:
    request = Request("r", TOKENS[:5], SamplingParams(), 0.0)
    hasher, found = PageHasher(4), list[bytes]()
    hasher.extend(request, found, [], 1)
    request.output_ids.extend(TOKENS[5:])
    hasher.extend(request, found, [], 2)  # this page spans prompt and output
    hasher.extend(request, found, [], 3)
    assert found == digests(TOKENS)


def test_pfx_03_salts_and_adapters_never_share_a_name() -> None:
    kinds: list[dict[str, Any]] = [
        {},
        {"cache_salt": ""},
        {"cache_salt": "x"},
        {"cache_salt": "y"},
        {"adapter_id": "x"},
        {"adapter_id": "y"},
        {"adapter_id": "x", "cache_salt": "y"},
        {"adapter_id": "y", "cache_salt": "x"},
        {"adapter_id": "xS\x01\x00\x00\x00y"},  # spells a salt after the adapter
        {"media_keys": (("x", 0, 1),)},
    ]
    names = [digests(TOKENS, **kind) for kind in kinds]
    assert all(not set(a) & set(b) for a, b in combinations(names, 2))
    assert digests(TOKENS, cache_salt="x") == digests(TOKENS, cache_salt="x")


def test_pfx_04_media_that_overlap_a_page_are_in_its_name() -> None:
    plain = digests(TOKENS)
    image = digests(TOKENS, media_keys=(("cat", 5, 4),))  # tokens 5 to 8: pages 1 and 2
    assert image[0] == plain[0]
    assert image[1] != plain[1]
    other = digests(TOKENS, media_keys=(("dog", 5, 4),))
    moved = digests(TOKENS, media_keys=(("cat", 4, 4),))
    longer = digests(TOKENS, media_keys=(("cat", 5, 5),))
    assert len({image[1], other[1], moved[1], longer[1]}) == 4
    borders = digests(TOKENS, media_keys=(("cat", 4, 2), ("cat", 6, 2))), digests(TOKENS, media_keys=(("cat", 4, 4),))
    assert borders[0][1] != borders[1][1]
    assert all(len(digest) == 32 for digest in image)


def test_media_outside_a_page_do_not_touch_its_name() -> None:
    assert digests(TOKENS, media_keys=(("cat", 8, 4),))[:2] == digests(TOKENS)[:2]


def test_the_salt_is_in_the_first_page_only_and_the_adapter_in_all() -> None:
    request = Request("r", TOKENS, SamplingParams(), 0.0, adapter_id="a", cache_salt="s")
    first, second = (extra_keys(request, index, 4) for index in (0, 1))
    assert first == b"A\x01\x00\x00\x00aS\x01\x00\x00\x00s"
    assert second == b"A\x01\x00\x00\x00a"
