"""A beam search as an engine runs it: as rounds of requests of one token each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxllm.engine.beam_search import Beam, BeamSearch, Candidate
from jaxllm.engine.inputs import InputProcessor, PreparedPrompt, check_terms
from jaxllm.engine.messages import AddRequest
from jaxllm.engine.parts import EngineParts
from jaxllm.errors import CapacityError, RequestError
from jaxllm.metrics.stats import FinishedRequest
from jaxllm.tokenizer.base import Tokenizer
from jaxllm.types.outputs import CompletionOutput, RequestMetrics, RequestOutput, TokenLogprob
from jaxllm.types.request import FinishReason
from jaxllm.types.sampling import BeamSearchParams, OutputKind, SamplingParams
from jaxllm.types.service import DEFAULT_SERVICE, ServiceParams


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamLimits:
    """What an engine can do for beam searches."""

    max_model_len: int
    vocab_size: int
    eos_ids: frozenset[int]
    max_logprobs: int
    logprobs_mode: str

    @classmethod
    def of(cls, parts: EngineParts) -> BeamLimits:
        return cls(
            max_model_len=parts.max_model_len,
            vocab_size=parts.vocab_size,
            eos_ids=parts.eos_ids,
            max_logprobs=parts.max_logprobs,
            logprobs_mode=parts.logprobs_mode,
        )

    def check(self, params: BeamSearchParams) -> None:
        """Raises: RequestError: this engine's log probabilities do not suffice for the search."""
        needed = 2 * params.beam_width
        if self.max_logprobs != -1 and needed > self.max_logprobs:
            raise RequestError(
                f"beam_width={params.beam_width} needs {needed} log probabilities a token and the engine was started "
                f"with max_logprobs={self.max_logprobs}; accepted: at most {self.max_logprobs // 2}",
                param="beam_width",
            )
        if self.logprobs_mode.endswith("logits"):
            raise RequestError(
                f"beam search cannot add up logits; accepted: an engine whose logprobs_mode={self.logprobs_mode} "
                "is raw_logprobs or processed_logprobs",
                param="beam_width",
            )
        if params.temperature not in (0.0, 1.0) and self.logprobs_mode != "processed_logprobs":
            raise RequestError(
                f"temperature={params.temperature} in a beam search needs logprobs_mode=processed_logprobs; accepted "
                "here: 0 or 1, for the model's own probabilities",
                param="temperature",
            )


class BeamRun:
    """One prompt's search. Mutable; owned by the call that runs it.

    `wanted` gives the next round's requests; `take` needs their outputs, in the same order.
    """

    def __init__(
        self,
        prompt: PreparedPrompt,
        params: BeamSearchParams,
        limits: BeamLimits,
        inputs: InputProcessor,
        *,
        request_id: str,
        arrival_s: float,
        priority: int = 0,
        cache_salt: str | None = None,
        service: ServiceParams = DEFAULT_SERVICE,
    ) -> None:
        """Raises: RequestError: see `BeamLimits.check`, or priority, salt or service are wrong."""
        limits.check(params)
        check_terms(priority, cache_salt, service)
        self.request_id = request_id
        self._prompt = prompt
        self._params = params
        self._inputs = inputs
        max_tokens = min(params.max_tokens, limits.max_model_len - len(prompt.token_ids))
        self._search = BeamSearch(params, max_tokens=max_tokens, eos_ids=limits.eos_ids)
        self._num_candidates = min(2 * params.beam_width, limits.vocab_size)
        self._step_params = SamplingParams(
            max_tokens=1,
            temperature=0.0 if params.temperature == 1.0 else params.temperature,
            logprobs=self._num_candidates,
            detokenize=False,
            output_kind=OutputKind.FINAL_ONLY,
            seed=0,
        )
        self._arrival_s = arrival_s
        self._priority = priority
        self._cache_salt = cache_salt
        self._service = service
        self._first_token_s: float | None = None
        self._num_cached = 0
        self._num_requests = 0
        self._is_aborted = False
        self._stop_reason: int | str | None = None  # of an abort
        self._stopped_by: BaseException | None = None

    def wanted(self) -> list[AddRequest]:
        """One request a running beam; none once the search is over."""
        beams = () if self._is_aborted else self._search.wanted()
        return [self._request(beam) for beam in beams]

    def take(self, outputs: Sequence[RequestOutput], now_s: float) -> None:
        """Continue the search; an aborted request, or one whose deadline passed, ends it."""
        for completion in (output.outputs[0] for output in outputs):
            if completion.finish_reason == FinishReason.ABORT:
                self._is_aborted, self._stop_reason = True, completion.stop_reason
                return
        if self._first_token_s is None:
            self._first_token_s, self._num_cached = now_s, outputs[0].num_cached_tokens
        self._search.advance([self._candidates(output) for output in outputs])

    def stop(self, error: BaseException) -> None:
        """It ends with this exception and has no output."""
        self._stopped_by = error

    def output(self, tokenizer: Tokenizer, now_s: float) -> RequestOutput:
        """The result: the best sequences, best first. Those that were cut off by an abort say so."""
        beams = self._search.best()
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt.text,
            prompt_token_ids=self._prompt.token_ids,
            outputs=tuple(self._completion(index, beam, tokenizer) for index, beam in enumerate(beams)),
            finished=True,
            num_cached_tokens=self._num_cached,
            num_generated_tokens=sum(len(beam.token_ids) for beam in beams),
            metrics=RequestMetrics(self._arrival_s, self._first_token_s, now_s),
        )

    def summary(self, now_s: float) -> FinishedRequest | None:
        """The search as one request, for metrics; None if it was refused."""
        is_refusal = isinstance(self._stopped_by, (RequestError, CapacityError))
        if is_refusal and self._first_token_s is None:
            return None
        beams = self._search.best()
        lengths = [len(beam.token_ids) for beam in beams]
        return FinishedRequest(
            reason=self._reason(beams[0]).value,
            num_prompt_tokens=len(self._prompt.token_ids),
            num_generation_tokens=sum(lengths),
            max_tokens=self._params.max_tokens,
            arrival_s=self._arrival_s,
            scheduled_s=None,
            first_token_s=self._first_token_s,
            last_token_s=None if self._first_token_s is None else now_s,
            finished_s=now_s,
            num_sequences=self._params.beam_width,
            longest_generation_tokens=max(lengths),
            num_cached_tokens=self._num_cached,
        )

    def _request(self, beam: Beam) -> AddRequest:
        self._num_requests += 1
        prompt = PreparedPrompt(None, self._prompt.token_ids + beam.token_ids)
        # A name that no caller's own request has: theirs are text without a zero byte.
        name = f"{self.request_id}\0{self._num_requests}"
        return self._inputs.request(
            prompt,
            self._step_params,
            request_id=name,
            arrival_s=self._arrival_s,  # of the search: a deadline counts from there, and later rounds keep their place
            priority=self._priority,
            cache_salt=self._cache_salt,
            service=self._service,
        )

    def _candidates(self, output: RequestOutput) -> list[Candidate]:
        logprobs = output.outputs[0].logprobs
        assert logprobs is not None  # asked for
        entries: list[TokenLogprob] = sorted(logprobs[0], key=lambda entry: (-entry.logprob, entry.token_id))
        return [(entry.token_id, entry.logprob) for entry in entries[: self._num_candidates]]

    def _reason(self, beam: Beam) -> FinishReason:
        if self._stopped_by is not None:  # cancelled, or the engine's own end
            return FinishReason.ERROR if isinstance(self._stopped_by, Exception) else FinishReason.ABORT
        if beam.ended_by is not None:
            return FinishReason.STOP
        return FinishReason.ABORT if self._is_aborted else FinishReason.LENGTH

    def _completion(self, index: int, beam: Beam, tokenizer: Tokenizer) -> CompletionOutput:
        ids = beam.token_ids if beam.ended_by is None else beam.token_ids[:-1]
        text = tokenizer.decode(ids)
        if beam.ended_by is not None and self._params.include_stop_str_in_output:
            text += tokenizer.decode([beam.ended_by], skip_special_tokens=False)
        reason = self._reason(beam)
        return CompletionOutput(
            index=index,
            text=text,
            token_ids=beam.token_ids,
            cumulative_logprob=beam.cumulative_logprob,
            finish_reason=reason.value,
            stop_reason=self._stop_reason if reason is FinishReason.ABORT else None,
        )
