"""What the host keeps of each request on the device: its known tokens and how to sample from it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxllm.sampling.state import NUM_COLUMNS, pack_row
from jaxllm.types.sampling import SamplingParams
from jaxllm.types.step import NewRequest


class Slots:
    """One row a slot. Mutable; owned by the Runner alone.

    Token ids past `num_known` were sampled while the request held the slot: the last of them is on
    the device, in `last_tokens[slot]`, and no step needs the ones before it, whose KV is written.
    """

    def __init__(
        self, max_num_seqs: int, max_model_len: int, eos_ids: Sequence[int], processor_names: Sequence[str] = ()
    ) -> None:
        self.token_ids = np.zeros((max_num_seqs, max_model_len), np.int32)
        self.num_known = np.zeros(max_num_seqs, np.int32)
        self.num_scored = np.zeros(max_num_seqs, np.int32)  # prompt tokens of those that want them scored, else 0
        self.sampling = np.zeros((max_num_seqs, NUM_COLUMNS), np.int32)
        self.is_greedy = np.zeros(max_num_seqs, np.bool_)
        self.wants_logprobs = np.zeros(max_num_seqs, np.bool_)  # of sampled tokens, or of the prompt
        self.params = [SamplingParams()] * max_num_seqs
        self._eos_ids = tuple(sorted(eos_ids))
        self._processor_names = tuple(processor_names)

    @property
    def num_bytes(self) -> int:
        arrays = (self.token_ids, self.num_known, self.num_scored, self.sampling, self.is_greedy, self.wants_logprobs)
        return sum(array.nbytes for array in arrays)

    def place(self, new: NewRequest) -> None:
        """Give a slot to a request that enters or re-enters; whatever held it before is forgotten."""
        slot, params, num_tokens = new.slot, new.params, len(new.token_ids)
        self.token_ids[slot, :num_tokens] = new.token_ids
        self.num_known[slot] = num_tokens
        self.num_scored[slot] = 0 if params.prompt_logprobs is None else new.num_prompt_tokens
        self.sampling[slot] = pack_row(params, new.seed, new.num_prompt_tokens, self._eos_ids, self._processor_names)
        self.is_greedy[slot] = params.is_greedy
        self.wants_logprobs[slot] = params.prompt_logprobs is not None or asks_for_logprobs(params)
        self.params[slot] = params


def asks_for_logprobs(params: SamplingParams) -> bool:
    """Of sampled tokens."""
    return params.logprobs is not None or params.logprob_token_ids is not None
