"""Pages waste a few slots of a request's last page; reservations waste what is not there yet."""

from __future__ import annotations

from pathlib import Path

from scripts.bench.kv_waste import draw, lengths, measure


def test_pages_of_16_waste_less_than_4_percent_of_chats_and_reservations_far_more(tmp_path: Path) -> None:
    waste = measure(lengths(120), page_size=16)
    assert 0 < waste.paged < 0.04
    assert waste.reserved_exactly > 0.2
    assert waste.reserved_whole > 0.7
    draw([waste], tmp_path / "waste.png")
    assert (tmp_path / "waste.png").exists()


def test_larger_pages_waste_more() -> None:
    sizes = lengths(40)
    shares = [measure(sizes, page_size).paged for page_size in (8, 16, 64)]
    assert shares == sorted(shares)
