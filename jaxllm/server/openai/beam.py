"""From an OpenAI request with `use_beam_search` to BeamSearchParams."""

from __future__ import annotations

from jaxllm.errors import RequestError, shown
from jaxllm.server.schema import GenerationRequest
from jaxllm.types.sampling import BeamSearchParams

# Fields that say how to draw or what to score, with the values beside null that ask for nothing. Beam search
# draws nothing: it takes the most likely sequences of the model's own probabilities.
_MEANINGLESS: dict[str, tuple[object, ...]] = {
    "stream": (False,),
    "stop": ([],),
    "stop_token_ids": ([],),
    "min_tokens": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "prompt_logprobs": (),
    "logprob_token_ids": (),
    "repetition_detection": ({},),
    "thinking_token_budget": (-1,),
    "structured_outputs": ({},),
    "truncate_prompt_tokens": (),
    "vllm_xargs": ({},),
}


def beam_params(request: GenerationRequest, width: int, max_tokens: int) -> BeamSearchParams:
    """`n` is the width. Fields of sampling that can change nothing (top_k, top_p, min_p, seed) are ignored.

    Raises:
        RequestError: a value is out of range, or has no meaning for beam search.
    """
    for name, neutral in _MEANINGLESS.items():
        value = getattr(request, name)
        if value is not None and value not in neutral:
            accepted = " or ".join(repr(item) for item in (*neutral, None))
            message = f"{name}={shown(value)} cannot be used with use_beam_search=true; accepted: {accepted}"
            raise RequestError(message, param=name)
    logprobs = getattr(request, "logprobs", None)
    if logprobs is not None and logprobs is not False:
        message = f"logprobs={shown(logprobs)} cannot be used with use_beam_search=true; accepted: None"
        raise RequestError(message, param="logprobs")
    return BeamSearchParams(
        beam_width=width,
        max_tokens=max_tokens,
        ignore_eos=bool(request.ignore_eos),
        temperature=request.temperature or 0.0,
        length_penalty=1.0 if request.length_penalty is None else request.length_penalty,
        include_stop_str_in_output=bool(request.include_stop_str_in_output),
    )
