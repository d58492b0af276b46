"""What the host keeps of each request on the device: its known tokens and its sampling columns."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxllm.sampling.state import NUM_COLUMNS, pack_row
from jaxllm.types.step import NewRequest


class Slots:
    """One row a slot. Mutable; owned by the Runner alone.

    Token ids past `num_known` were sampled while the request held the slot: the last of them is on
    the device, in `last_tokens[slot]`, and no step needs the ones before it, whose KV is written.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, eos_ids: Sequence[int]) -> None:
        self.token_ids = np.zeros((max_num_seqs, max_model_len), np.int32)
        self.num_known = np.zeros(max_num_seqs, np.int32)
        self.sampling = np.zeros((max_num_seqs, NUM_COLUMNS), np.int32)
        self.is_greedy = np.zeros(max_num_seqs, np.bool_)
        self._eos_ids = tuple(sorted(eos_ids))

    @property
    def num_bytes(self) -> int:
        return self.token_ids.nbytes + self.num_known.nbytes + self.sampling.nbytes + self.is_greedy.nbytes

    def place(self, new: NewRequest) -> None:
        """Give a slot to a request that enters or re-enters; whatever held it before is forgotten."""
        num_tokens = len(new.token_ids)
        self.token_ids[new.slot, :num_tokens] = new.token_ids
        self.num_known[new.slot] = num_tokens
        self.sampling[new.slot] = pack_row(new.params, new.seed, new.num_prompt_tokens, self._eos_ids)
        self.is_greedy[new.slot] = new.params.is_greedy
