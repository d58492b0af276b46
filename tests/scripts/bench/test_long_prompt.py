"""A long prompt in pieces does not hold chats up; whole, it does."""

from __future__ import annotations

from pathlib import Path

from scripts.bench.long_prompt import compare, draw


def test_the_longest_gap_of_a_chat_stays_below_two_steps_unless_the_prompt_is_computed_whole(tmp_path: Path) -> None:
    pieces, capped, share, whole = compare(num_prompt=50_000, num_chats=32, budget=512)
    for gaps in (pieces, capped, share):
        assert gaps.most_steps == 1, "every step gives every chat its token"
        assert gaps.most_s < 2 * pieces.median_step_s
    assert whole.most_s > 50 * pieces.median_step_s
    assert capped.most_s < share.most_s < pieces.most_s, "what is kept for chats makes steps shorter"
    assert pieces.num_steps >= 50_000 // 512
    draw((pieces, whole), tmp_path / "gaps.png")
    assert (tmp_path / "gaps.png").stat().st_size > 10_000
