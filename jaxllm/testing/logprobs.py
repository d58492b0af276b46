"""The log probabilities that the scripted executor answers: a rule simple enough to work out by hand.

At a position that holds token t, of a vocabulary of V ids, token x has

    base  = t - t % 7
    place = (x - base) % V                 0 is the most likely
    log probability = -(1 + place)         rank = 1 + place

So t itself has log probability -(1 + t % 7) and rank 1 + t % 7, and the most likely tokens are base,
base + 1, base + 2, ...: seven letters in a row share their most likely ones. The same rule holds for
the tokens of a prompt. Each value is exact in float32, and the probabilities of a position sum to less
than 1. `logprobs_mode` makes no difference.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxllm.testing.byte_tokenizer import ByteLevelTokenizer
from jaxllm.types.step import Logprobs

BYTE_VOCABULARY = ByteLevelTokenizer.vocab_size
_GROUP = 7


def scripted_logprob(at: int, token_id: int | None = None, vocab_size: int = BYTE_VOCABULARY) -> float:
    """The log probability of `token_id` (none: of `at` itself) at a position that holds token `at`."""
    return -float(scripted_rank(at, token_id, vocab_size))


def scripted_rank(at: int, token_id: int | None = None, vocab_size: int = BYTE_VOCABULARY) -> int:
    """The rank, 1 the most likely, of `token_id` (none: of `at` itself) at a position that holds token `at`."""
    wanted = at if token_id is None else token_id
    return 1 + (wanted - (at - at % _GROUP)) % vocab_size


def scripted_top(at: int, num: int, vocab_size: int = BYTE_VOCABULARY) -> list[int]:
    """The `num` (-1: all) most likely tokens, most likely first, at a position that holds token `at`."""
    base = at - at % _GROUP
    return [(base + place) % vocab_size for place in range(vocab_size if num == -1 else min(num, vocab_size))]


def scripted_columns(
    token_ids: Sequence[int],
    num_top: int = 0,
    chosen_ids: Sequence[int] | None = None,
    vocab_size: int = BYTE_VOCABULARY,
) -> Logprobs:
    """What the executor answers for positions that hold `token_ids`.

    `num_top` entries each (-1: all), or those of `chosen_ids` (`logprob_token_ids`), in its order.
    """
    top_ids = [scripted_top(t, num_top, vocab_size) if chosen_ids is None else list(chosen_ids) for t in token_ids]
    return Logprobs(
        token_ids=list(token_ids),
        values=[scripted_logprob(t, None, vocab_size) for t in token_ids],
        ranks=[scripted_rank(t, None, vocab_size) for t in token_ids],
        top_ids=top_ids,
        top_values=[
            [scripted_logprob(t, x, vocab_size) for x in ids] for t, ids in zip(token_ids, top_ids, strict=True)
        ],
        is_ranked=chosen_ids is None,
    )
