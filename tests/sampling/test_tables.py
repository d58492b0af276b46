from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.errors import RequestError
from jaxllm.sampling.state import unpack
from jaxllm.sampling.tables import (
    HISTORY_CHUNK,
    HISTORY_SIZE,
    Tables,
    pack_tables,
    record,
    set_history,
    set_tables,
    table_shapes,
    tables_size,
)
from jaxllm.types.sampling import MAX_BAD_SEQUENCE_TOKENS, MAX_BAD_SEQUENCES, MAX_LOGIT_BIAS, SamplingParams
from jaxllm.types.step import NewRequest
from tests.sampling.drawing import empty_tables, place, rows_of
from tests.sampling.reference import Row

VOCAB = 70  # no whole number of words
NO_LOGITS = np.zeros(VOCAB, np.float32)


def new_request(params: SamplingParams, tokens: tuple[int, ...] = (), bad_words: tuple[tuple[int, ...], ...] = ()):
    return NewRequest("r", 1, tokens, 0, params, 0, 0, bad_word_ids=bad_words)


def placed(params: SamplingParams, bad_words: tuple[tuple[int, ...], ...] = ()) -> Tables:
    row = Row(logits=NO_LOGITS, params=params, bad_word_ids=bad_words)
    return jax.tree.map(np.asarray, place(empty_tables(VOCAB, 3), row, 1, VOCAB))


def allowed_ids(tables: Tables, slot: int) -> list[int]:
    bits = np.unpackbits(np.asarray(tables.allowed)[slot].view(np.uint8), bitorder="little")
    return np.flatnonzero(bits).tolist()


def test_a_request_that_asks_for_nothing_sends_nothing() -> None:
    plain = SamplingParams(temperature=0.7, top_k=3, top_p=0.5, min_p=0.1, min_tokens=2, logprobs=3)
    assert pack_tables(new_request(plain, (1, 2, 3)), VOCAB) == (None, ())


def test_allowed_ids_are_set_bits_and_all_else_is_clear() -> None:
    tables = placed(SamplingParams(allowed_token_ids=(0, 31, 32, 69)))
    assert allowed_ids(tables, 1) == [0, 31, 32, 69]


def test_bad_words_of_one_token_clear_their_bits() -> None:
    tables = placed(SamplingParams(bad_words=("x",)), ((5,), (64,), (7, 8)))
    assert allowed_ids(tables, 1) == [i for i in range(VOCAB) if i not in (5, 64)]
    both = placed(SamplingParams(bad_words=("x",), allowed_token_ids=(4, 5)), ((5,),))
    assert allowed_ids(both, 1) == [4]


def test_bad_sequences_end_at_the_right() -> None:
    bad_words = np.asarray(placed(SamplingParams(bad_words=("x",)), ((7, 8), (1,), (9, 8, 7))).bad_words)[1]
    assert bad_words[0].tolist() == [-1] * (MAX_BAD_SEQUENCE_TOKENS - 2) + [7, 8]
    assert bad_words[1].tolist() == [-1] * (MAX_BAD_SEQUENCE_TOKENS - 3) + [9, 8, 7]
    assert (bad_words[2:] == -1).all()


def test_biases_and_asked_for_ids_keep_their_order() -> None:
    tables = placed(SamplingParams(logit_bias={9: 1.5, 2: -100.0}, logprob_token_ids=(8, 3)))
    assert np.asarray(tables.bias_ids)[1, :3].tolist() == [9, 2, -1]
    assert np.asarray(tables.bias_values)[1, :3].tolist() == [1.5, -100.0, 0.0]
    assert np.asarray(tables.logprob_ids)[1, :3].tolist() == [8, 3, -1]


def test_other_slots_stay_as_they_were() -> None:
    params = SamplingParams(
        logit_bias={9: 1.5},
        logprob_token_ids=(8, 3),
        allowed_token_ids=(1,),
        bad_words=("x",),
        presence_penalty=1.0,
    )
    row = Row(logits=NO_LOGITS, params=params, tokens=(5, 6), bad_word_ids=((1, 2),))
    before = empty_tables(VOCAB, 3)
    after = place(empty_tables(VOCAB, 3), row, 1, VOCAB)
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(np.asarray(old)[[0, 2]], np.asarray(new)[[0, 2]])
        assert (np.asarray(old)[1] != np.asarray(new)[1]).any()


@pytest.mark.parametrize("num_tokens", [0, 1, HISTORY_CHUNK, HISTORY_CHUNK + 1, 2 * HISTORY_CHUNK + 5])
def test_history_of_any_length_arrives_in_chunks(num_tokens: int) -> None:
    max_model_len = 2 * HISTORY_CHUNK + 5
    tokens = tuple(np.random.default_rng(0).integers(0, VOCAB, num_tokens).tolist())
    _, chunks = pack_tables(new_request(SamplingParams(frequency_penalty=1.0), tokens), VOCAB)
    assert len(chunks) == -(-num_tokens // HISTORY_CHUNK)
    assert all(c.shape == (HISTORY_SIZE,) and c.dtype == np.int32 for c in chunks)
    tables = empty_tables(VOCAB, 3, max_model_len)
    for chunk in chunks:
        tables = jax.jit(set_history)(tables, chunk)
    history = np.asarray(tables.history)
    assert history[1].tolist() == list(tokens) + [1] * (max_model_len - num_tokens)
    assert (history[[0, 2]] == 1).all()


def test_bad_sequences_need_the_history_and_single_tokens_do_not() -> None:
    params = SamplingParams(bad_words=("x",))
    assert pack_tables(new_request(params, (1, 2), ((5,),)), VOCAB)[1] == ()
    assert len(pack_tables(new_request(params, (1, 2), ((5, 6),)), VOCAB)[1]) == 1


def test_sampled_tokens_are_recorded_where_they_belong() -> None:
    tables = empty_tables(VOCAB, 4, 10)
    rows = rows_of([SamplingParams()] * 3, positions=[4, 9, 10])  # the last is past the end
    after = np.asarray(jax.jit(record)(tables, jax.jit(unpack)(rows), jnp.array([50, 51, 52])).history)
    expected = np.ones((4, 10), np.int32)
    expected[0, 4], expected[1, 9] = 50, 51
    np.testing.assert_array_equal(after, expected)


def test_full_rows_fit_and_more_is_refused() -> None:
    full = SamplingParams(logit_bias=dict.fromkeys(range(MAX_LOGIT_BIAS), 1.0), bad_words=("x",))
    longest = tuple(range(MAX_BAD_SEQUENCE_TOKENS))
    row, _ = pack_tables(new_request(full, (), (longest,) * MAX_BAD_SEQUENCES), VOCAB)
    assert row is not None and row.shape == (tables_size(VOCAB),)
    for too_many in ((longest,) * (MAX_BAD_SEQUENCES + 1), ((*longest, 1),)):
        with pytest.raises(RequestError, match=r"bad_words are .* sequences of up to .* accepted: at most 512"):
            pack_tables(new_request(full, (), too_many), VOCAB)


def test_tables_are_changed_in_place() -> None:
    """All bytes of the result lie in the donated tables, and no temporary is as large as one of them."""
    shapes = table_shapes(65, 49_152, 8192)
    num_bytes = sum(np.prod(s.shape) * s.dtype.itemsize for s in jax.tree.leaves(shapes))
    packed = {
        set_tables: jax.ShapeDtypeStruct((tables_size(49_152),), np.int32),
        set_history: jax.ShapeDtypeStruct((HISTORY_SIZE,), np.int32),
    }
    for function, argument in packed.items():
        analysis = jax.jit(function, donate_argnums=0).lower(shapes, argument).compile().memory_analysis()
        assert analysis is not None
        assert analysis.alias_size_in_bytes == num_bytes
        assert analysis.temp_size_in_bytes < 2**18
