"""One server for the tests that only ask it things."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.scripted_engine import script, scripted
from tests.server.harness import Running, running

SPLIT_CHARACTER = "Ä 🫠 ok"  # its bytes come one token at a time


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    executor = scripted(
        script(SPLIT_CHARACTER, prompt_contains="unicode"),
        script("", prompt_contains="silent"),
        script("over and over ", prompt_contains="long", repeat=True),
        script("one two STOP three", prompt_contains="stopping"),
        default=script("Hello"),
    )
    with running(executor, served_model_names=("tiny", "alias/of-tiny")) as served:
        yield served
