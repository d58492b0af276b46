"""The offline API: a model in this process, batches of prompts in, results out."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

from jaxllm.build import Progress, build_chat_template, build_parts
from jaxllm.config.engine import EngineArgs
from jaxllm.config.fields import settings_of
from jaxllm.engine.engine import Engine
from jaxllm.engine.inputs import InputProcessor, Prompt, TextPrompt, TokensPrompt
from jaxllm.errors import ConfigError, RequestError, shown
from jaxllm.types.outputs import RequestOutput
from jaxllm.types.sampling import SamplingParams
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
    spellings work too (`block_size=16`). Not thread-safe: one call at a time.

    Raises:
        ConfigError: an unknown flag, or a value that is out of range; see also `build_parts`.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        report: StartupReport | None = None,
        progress: Progress | None = None,
        **engine_flags: Any,
    ) -> None:
        args = engine_args(model=model, **engine_flags)
        self.report = report or StartupReport()
        self._template = build_chat_template(args)  # first: it is quick to refuse
        parts = build_parts(args, self.report, progress=progress)
        self._inputs = InputProcessor(
            parts.tokenizer,
            max_model_len=parts.max_model_len,
            vocab_size=parts.vocab_size,
            eos_ids=parts.eos_ids,
            seed=parts.seed,
        )
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
    ) -> list[RequestOutput]:
        """Complete prompts; results come in their order.

        A prompt is text, a list of token ids, `{"prompt": text}` or `{"prompt_token_ids": ids}`.
        `sampling_params` is one for all, one for each, or None for the model's defaults.
        `on_update` hears every output on its way.

        Raises:
            RequestError: a prompt or a parameter is wrong; nothing was run.
            CapacityError, EngineDead: see `Engine.generate`.
        """
        listed = _listed(prompts)
        prepared = [self._prepare_at(index, prompt, len(listed)) for index, prompt in enumerate(listed)]
        return self._engine.generate(prepared, self._params(sampling_params, len(listed)), on_update)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_update: OnUpdate | None = None,
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
        return self.generate(prompts, sampling_params, on_update=on_update)

    def render(self, messages: Messages, **options: Any) -> TextPrompt:
        """The prompt that `chat` makes of a conversation; options are those of `ChatTemplate.render`.

        Raises:
            RequestError: see `chat`.
        """
        if self._template is None:
            raise RequestError("this model has no chat template; give one with chat_template", param="messages")
        # The template writes the special tokens itself.
        return TextPrompt(self._template.render(messages, **options), add_special_tokens=False)

    def prepare(self, prompt: AnyPrompt) -> TokensPrompt:
        """The ids of a prompt, checked: not empty, of this vocabulary, and with room for an answer.

        Raises:
            RequestError: what is wrong with it.
        """
        prepared = self._inputs.tokenize(_as_prompt(prompt))
        return TokensPrompt(prepared.token_ids, prepared.text)

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def close(self) -> None:
        """Stop the engine and release the device. Safe to call twice."""
        self._engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _prepare_at(self, index: int, prompt: AnyPrompt, count: int) -> TokensPrompt:
        try:
            return self.prepare(prompt)
        except RequestError as error:
            if count == 1:
                raise
            raise RequestError(f"prompts[{index}]: {error}", param=error.param, code=error.code) from None

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
