"""The offline API: a model in this process, batches of prompts in, results out."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

from jaxllm.build import Progress, build_chat_template, build_parts
from jaxllm.config.engine import EngineArgs
from jaxllm.config.fields import settings_of
from jaxllm.engine.engine import Engine, Terms, at_index
from jaxllm.engine.inputs import Prompt, TextPrompt, TokensPrompt
from jaxllm.errors import ConfigError, RequestError, shown
from jaxllm.types.outputs import RequestOutput
from jaxllm.types.processors import LogitsProcessor
from jaxllm.types.profile import StepProfile
from jaxllm.types.sampling import BeamSearchParams, SamplingParams
from jaxllm.types.service import DEFAULT_SERVICE, ServiceParams
from jaxllm.types.startup import StartupReport

if TYPE_CHECKING:
    from jaxllm.metrics.stats import EngineStats
    from jaxllm.tokenizer.base import Tokenizer

AnyPrompt = Prompt | Mapping[str, Any] | Sequence[int]
Messages = Sequence[Mapping[str, Any]]
OnUpdate = Callable[[RequestOutput], None]
_PROMPTS = "text, token ids, {'prompt': text} or {'prompt_token_ids': ids}"


class LLM:
    """A model that answers in this process.

        with LLM(model="smollm2-135m") as llm:
            llm.generate(["Once upon a time"], SamplingParams(max_tokens=32))

    Keyword arguments are the engine's flags with underscores (`max_model_len=2048`); a flag's other
    spellings work too (`block_size=16`). `logits_processors` are functions of the caller's own over
    logits, compiled at start; see `LogitsProcessor`. Not thread-safe: one call at a time.

    Raises:
        ConfigError: an unknown flag, or a value that is out of range; see also `build_parts`.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        report: StartupReport | None = None,
        progress: Progress | None = None,
        logits_processors: Sequence[LogitsProcessor] = (),
        **engine_flags: Any,
    ) -> None:
        args = engine_args(model=model, **engine_flags)
        self.report = _checked_report(report)
        if progress is not None and not callable(progress):
            raise ConfigError(f"progress={shown(progress)}; accepted: a function of (phase, done, total), or None")
        self._template = build_chat_template(args)  # first: it is quick to refuse
        parts = build_parts(args, self.report, progress=progress, logits_processors=logits_processors)
        self._engine = Engine(parts)

    @property
    def tokenizer(self) -> Tokenizer:
        return self._engine.tokenizer

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and output together."""
        return self._engine.max_model_len

    def default_sampling_params(self, **fields: Any) -> SamplingParams:
        """The model's own sampling defaults, with `fields` put over them."""
        return SamplingParams(**{**self._engine.default_params, **fields})

    def generate(
        self,
        prompts: AnyPrompt | Sequence[AnyPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_update: OnUpdate | None = None,
        priority: int | Sequence[int] | None = None,
        service: ServiceParams | Sequence[ServiceParams] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts; results come in their order.

        A prompt is text, a list of token ids, `{"prompt": text}` or `{"prompt_token_ids": ids}`.
        `sampling_params` is one for all, one for each, or None for the model's defaults.
        `on_update` hears every output on its way. `priority` (lower runs earlier, where
        `scheduling_policy` looks at it) and `service` are one for all or one for each. A request
        that a deadline of its service ends has finish_reason "abort" and stop_reason "deadline".

        Raises:
            RequestError: a prompt or a parameter is wrong; nothing was run.
            CapacityError, EngineDead: see `Engine.generate`.
        """
        if on_update is not None and not callable(on_update):
            message = f"on_update={shown(on_update)}; accepted: a function of one RequestOutput, or None"
            raise RequestError(message, param="on_update")
        given = _as_prompts(prompts)
        terms = _terms(priority, service, len(given))
        return self._engine.generate(given, self._params(sampling_params, len(given)), on_update, terms)

    def beam_search(
        self,
        prompts: AnyPrompt | Sequence[AnyPrompt],
        params: BeamSearchParams,
        *,
        priority: int = 0,
        service: ServiceParams = DEFAULT_SERVICE,
    ) -> list[RequestOutput]:
        """The `beam_width` most likely sequences after each prompt, best first, in `outputs`.

        Needs `max_logprobs` of at least twice the width, a flag of the engine. Token ids hold the
        end-of-sequence token; its text is shown with `include_stop_str_in_output` alone.

        Raises:
            RequestError: a prompt or a parameter is wrong; nothing was run.
            CapacityError, EngineDead: see `Engine.generate`.
        """
        asked: Any = params
        if not isinstance(asked, BeamSearchParams):
            raise RequestError(f"params={shown(asked)}; accepted: BeamSearchParams", param="params")
        return self._engine.beam_search(_as_prompts(prompts), params, Terms(priority=priority, service=service))

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_update: OnUpdate | None = None,
        priority: int | Sequence[int] | None = None,
        service: ServiceParams | Sequence[ServiceParams] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Reply to one conversation, or to each of several; see `generate`.

        Raises:
            RequestError: also where the model has no chat template, or it refuses the messages.
        """
        conversations = cast("list[Messages]", [messages] if _is_conversation(messages) else list(messages))
        prompts = [
            self.render(
                conversation,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                **_template_kwargs(chat_template_kwargs),
            )
            for conversation in conversations
        ]
        return self.generate(prompts, sampling_params, on_update=on_update, priority=priority, service=service)

    def render(self, messages: Messages, **options: Any) -> TextPrompt:
        """The prompt that `chat` makes of a conversation; options are those of `ChatTemplate.render`.

        Raises:
            RequestError: see `chat`.
        """
        if self._template is None:
            raise RequestError("this model has no chat template; give one with chat_template", param="messages")
        # The template writes the special tokens itself.
        return TextPrompt(self._template.render(messages, **options), add_special_tokens=False)

    def prepare(self, prompt: AnyPrompt, params: SamplingParams | None = None) -> TokensPrompt:
        """The ids of a prompt, cut as `params` say and checked: not empty, of this vocabulary, short enough.

        Raises:
            RequestError: what is wrong with it, or with `params`.
        """
        prepared = self._engine.prepare(_as_prompt(prompt), params)
        return TokensPrompt(prepared.token_ids, prepared.text)

    def reset_prefix_cache(self) -> bool:
        """Forget every page of the prefix cache; False where a request held some, which no call leaves behind.

        Raises:
            EngineDead: the engine stopped.
        """
        return self._engine.reset_prefix_cache()

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def step_profiles(self) -> list[StepProfile]:
        """Where the time of each step since the last call went; the last 8,192 of each device are kept.

        `ProfileSummary.of` sums them up.
        """
        return self._engine.step_profiles()

    def start_profile(self, folder: str | Path) -> None:
        """Begin a trace of the device and of Python, to be written under `folder` (for TensorBoard or Perfetto).

        Raises:
            RequestError: one is being taken already, or the folder cannot be made.
        """
        self._engine.start_profile(folder)

    def stop_profile(self) -> Path:
        """End the trace and write it; returns its folder.

        Raises:
            RequestError: none is being taken, or it cannot be written.
        """
        return self._engine.stop_profile()

    def close(self) -> None:
        """Stop the engine and release the device. Safe to call twice."""
        self._engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _params(self, params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> Sequence[SamplingParams]:
        if params is None:
            params = self.default_sampling_params()
        if isinstance(params, SamplingParams):
            return [params] * count
        given: Any = params
        if not isinstance(given, Sequence) or not all(isinstance(each, SamplingParams) for each in params):
            accepted = "SamplingParams, or a list of them, one for each prompt"
            raise RequestError(f"sampling_params={shown(given)}; accepted: {accepted}", param="sampling_params")
        return list(params)


def _terms(priority: Any, service: Any, count: int) -> list[Terms]:
    priorities = _one_each("priority", priority, 0, count, "an integer")
    services = _one_each("service", service, DEFAULT_SERVICE, count, "ServiceParams")
    return [Terms(priority=each, service=serving) for each, serving in zip(priorities, services, strict=True)]


def _one_each(name: str, given: Any, default: Any, count: int, accepted: str) -> list[Any]:
    """As many as there are prompts, None standing for the default; what each is, the engine checks."""
    if not isinstance(given, (list, tuple)):
        return [default if given is None else given] * count
    listed: list[Any] = list(cast("Sequence[Any]", given))
    if len(listed) != count:
        accepted = f"{accepted}, or a list of them, one for each prompt"
        raise RequestError(f"{name} has {len(listed)} entries for {count} prompts; accepted: {accepted}", param=name)
    return listed


def engine_args(**flags: Any) -> EngineArgs:
    """`EngineArgs` from flags under any of their spellings.

    Raises:
        ConfigError: an unknown flag (the closest one is named), one given twice, or a wrong value.
    """
    names = {spelling: item.name for item in settings_of(EngineArgs) for spelling in (item.name, *item.aliases)}
    names = {spelling.replace("-", "_"): name for spelling, name in names.items()}
    values: dict[str, Any] = {}
    for flag, value in flags.items():
        name = names.get(flag)
        if name is None:
            close = difflib.get_close_matches(flag, names, n=1)
            hint = f"did you mean {close[0]}?" if close else f"accepted: {', '.join(sorted(names))}"
            raise ConfigError(f"unknown engine flag {flag}={value!r}; {hint}")
        if name in values:
            raise ConfigError(f"{flag}={value!r} and {name}={values[name]!r} set the same thing; give one")
        values[name] = value
    return EngineArgs(**values)


def _checked_report(report: Any) -> StartupReport:
    if report is not None and not isinstance(report, StartupReport):
        raise ConfigError(f"report={shown(report)}; accepted: a StartupReport, or None")
    return report or StartupReport()


def _template_kwargs(kwargs: Any) -> dict[str, Any]:
    if kwargs is None:
        return {}
    if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) for name in kwargs):
        message = f"chat_template_kwargs={shown(kwargs)}; accepted: a dictionary of names and values"
        raise RequestError(message, param="chat_template_kwargs")
    for name in ("tools", "add_generation_prompt", "continue_final_message"):
        if name in kwargs:
            message = f"chat_template_kwargs may not set {name}; it is an argument of its own"
            raise RequestError(message, param="chat_template_kwargs")
    return dict(cast("Mapping[str, Any]", kwargs))


def _is_conversation(messages: Any) -> bool:
    return not messages or not isinstance(messages, (list, tuple)) or isinstance(messages[0], Mapping)


def _listed(prompts: Any) -> list[AnyPrompt]:
    """One prompt or several, as a list. A list of integers is one prompt."""
    if isinstance(prompts, (str, Mapping, TextPrompt, TokensPrompt)):
        return [cast("AnyPrompt", prompts)]
    if not isinstance(prompts, Iterable) or isinstance(prompts, bytes):
        raise RequestError(f"prompts={shown(prompts)}; accepted: {_PROMPTS}, or a list of these", param="prompts")
    listed: list[Any] = list(cast("Iterable[Any]", prompts))
    return [listed] if listed and isinstance(listed[0], int) else listed


def _as_prompts(prompts: Any) -> list[Prompt]:
    listed = _listed(prompts)
    return [at_index(lambda each=each: _as_prompt(each), index, len(listed)) for index, each in enumerate(listed)]


def _as_prompt(prompt: AnyPrompt) -> Prompt:
    if isinstance(prompt, (str, TextPrompt, TokensPrompt)):
        return prompt
    if not isinstance(prompt, Mapping):
        given: Any = prompt
        if not isinstance(given, Iterable) or isinstance(given, bytes):
            raise RequestError(f"prompt={shown(given)}; accepted: {_PROMPTS}", param="prompt")
        return TokensPrompt(prompt)
    ids, text = prompt.get("prompt_token_ids"), prompt.get("prompt")
    if isinstance(ids, Sequence) and not isinstance(ids, str):
        return TokensPrompt(cast("Sequence[int]", ids), text if isinstance(text, str) else None)
    if isinstance(text, str):
        return TextPrompt(text)
    raise RequestError("a prompt object needs the key prompt (text) or prompt_token_ids (a list)", param="prompt")
