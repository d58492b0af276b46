"""The composition root: from settings to the parts of an engine. The only place brain meets body."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from jaxllm.config.checkpoint import (
    DEFAULT_MODEL,
    GenerationDefaults,
    load_generation,
    load_model_config,
    resolve_model,
)
from jaxllm.config.engine import Backend, CacheConfig, ConfigParts, EngineArgs, json_object, to_parts
from jaxllm.config.env import read_environment
from jaxllm.engine.kv_events import KVEventPublisher, kinds_of
from jaxllm.engine.kv_publisher import ZmqPublisher, check_endpoints
from jaxllm.engine.parts import CoreParts, EngineParts
from jaxllm.engine.trace import Header, TraceRecorder, trace_path
from jaxllm.engine.trace_file import FileRecorder, check_writable
from jaxllm.errors import ConfigError, shown
from jaxllm.memory.plan import KVCachePlan, KVGroup
from jaxllm.memory.spec import FullKV, pages_for
from jaxllm.scheduler.make import make_scheduler
from jaxllm.scheduler.registry import create_policy
from jaxllm.tokenizer.base import Tokenizer
from jaxllm.tokenizer.chat import ChatTemplate
from jaxllm.tokenizer.load import load_chat_template, load_tokenizer
from jaxllm.types.processors import MAX_PROCESSORS, LogitsProcessor
from jaxllm.types.startup import StartupReport

if TYPE_CHECKING:
    from jaxllm.config.model import ModelConfig
    from jaxllm.engine.executor import Executor
    from jaxllm.runner.runner import Runner

logger = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]  # (phase, done, total)
_SCRIPTED_MAX_PAGES = 1 << 20  # page numbers cost host memory even where there are no pages
_BYTE_TEMPLATE = (
    "{% for m in messages %}<|{{ 'assistant' if m.role == 'assistant' else 'user' }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    """What the files say, before any device is asked."""

    path: Path | None  # None: the scripted stand-in without a model
    tokenizer: Tokenizer
    generation: GenerationDefaults

    @property
    def eos_ids(self) -> frozenset[int]:
        ids = self.generation.eos_ids
        own = self.tokenizer.eos_id
        return frozenset(ids) if ids or own is None else frozenset({own})


def build_parts(
    args: EngineArgs,
    report: StartupReport | None = None,
    *,
    progress: Progress | None = None,
    logits_processors: Sequence[LogitsProcessor] = (),
) -> EngineParts:
    """Load everything that `args` names; the engine made of the result is ready to serve.

    The phases and the memory plan go into `report`; `progress` hears of weights read and programs
    compiled. With a scripted executor jax is never imported, and `logits_processors` do nothing.

    Raises:
        ConfigError: a setting is wrong, or the model is not found.
        UnsupportedModel, WeightsError: the checkpoint is of a kind that is not served, or broken.
        CapacityError: it does not fit into memory.
    """
    report = report or StartupReport()
    options = json_object("scheduling_policy_options", args.scheduling_policy_options)
    create_policy(args.scheduling_policy, options)  # first: a wrong name costs no time
    if args.record_trace is not None:
        check_writable(trace_path(args.record_trace, 0))
    if args.kv_events is not None:
        check_endpoints(args.kv_events, args.data_parallel_size)
    processors = _checked_processors(logits_processors)
    if args.scripted_file is not None:
        return _build_scripted(args, args.scripted_file, processors, report)
    return _build_on_device(args, processors, report, progress)


def _checked_processors(given: Any) -> tuple[LogitsProcessor, ...]:
    accepted = f"a list of at most {MAX_PROCESSORS} LogitsProcessor with names of their own"
    if not isinstance(given, Sequence) or not all(isinstance(p, LogitsProcessor) for p in cast("Sequence[Any]", given)):
        raise ConfigError(f"logits_processors={shown(given)}; accepted: {accepted}")
    processors = tuple(cast("Sequence[LogitsProcessor]", given))
    names = [p.name for p in processors]
    if len(names) > MAX_PROCESSORS or len(set(names)) < len(names) or not all(names):
        raise ConfigError(f"logits_processors are named {shown(names)}; accepted: {accepted}")
    return processors


def build_chat_template(args: EngineArgs) -> ChatTemplate | None:
    """The chat template that `args` names, else the checkpoint's; None where there is none.

    Raises:
        ConfigError: the model or the template is not found, or the template does not parse.
    """
    path = _resolve(args)
    if path is None:
        return ChatTemplate(_BYTE_TEMPLATE)
    return load_chat_template(path, args.chat_template)


def model_name(args: EngineArgs) -> str:
    return args.served_model_name[0] if args.served_model_name else args.model or DEFAULT_MODEL


def _resolve(args: EngineArgs) -> Path | None:
    """The checkpoint's path. A scripted executor does without one where nothing is installed."""
    try:
        return resolve_model(args.model)
    except ConfigError:
        if args.scripted_file is None or args.model is not None:
            raise
        logger.warning("the default model is not installed: the scripted executor speaks bytes, one token each")
        return None


def _read_checkpoint(args: EngineArgs, report: StartupReport) -> _Checkpoint:
    with report.phase("tokenizer"):
        path = _resolve(args)
        if path is None:
            from jaxllm.testing.byte_tokenizer import ByteLevelTokenizer

            return _Checkpoint(None, cast("Tokenizer", ByteLevelTokenizer()), GenerationDefaults(()))
        tokenizer = load_tokenizer(path if args.tokenizer is None else resolve_tokenizer(args.tokenizer))
        return _Checkpoint(path, tokenizer, load_generation(path, args.generation_config))


def resolve_tokenizer(name: str) -> Path:
    """The folder or .gguf file of a tokenizer; a folder needs no config.json.

    Raises:
        ConfigError: nothing is found.
    """
    path = Path(name).expanduser()
    return path if path.is_dir() and not list(path.glob("*.gguf")) else resolve_model(name)


def _build_scripted(
    args: EngineArgs, script: str, processors: Sequence[LogitsProcessor], report: StartupReport
) -> EngineParts:
    from jaxllm.testing.scripted import ScriptedExecutor

    if args.data_parallel_size > 1:
        raise ConfigError(f"data_parallel_size={args.data_parallel_size} needs devices; accepted with scripted: 1")
    checkpoint = _read_checkpoint(args, report)
    tokenizer = checkpoint.tokenizer
    if not checkpoint.eos_ids:
        raise ConfigError("executor=scripted needs a tokenizer with an end-of-sequence token")
    executor = ScriptedExecutor.from_file(
        script,
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
        eos_id=min(checkpoint.eos_ids),
        decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=False),
        vocab_size=tokenizer.vocab_size,
    )
    parts = to_parts(replace(args, max_model_len=args.max_model_len or executor.max_model_len), None, "cpu")
    core = _core(args, checkpoint, parts, _scripted_plan(parts), executor)
    return _assemble(args, checkpoint, parts, (core,), tokenizer.vocab_size, processors)


def _scripted_plan(parts: ConfigParts) -> KVCachePlan:
    """Pages for every slot at full length, unless a number is given. Their bytes mean nothing."""
    cache, scheduler = parts.cache, parts.scheduler
    wanted = 1 + scheduler.max_num_seqs * pages_for(scheduler.max_model_len, cache.page_size)
    spec = FullKV(page_size=cache.page_size, num_kv_heads=1, head_dim=1)
    return KVCachePlan((KVGroup((0,), spec),), cache.num_pages or min(wanted, _SCRIPTED_MAX_PAGES), cache.page_size)


def _build_on_device(
    args: EngineArgs, processors: Sequence[LogitsProcessor], report: StartupReport, progress: Progress | None
) -> EngineParts:
    path = resolve_model(args.model)
    with report.phase("read config"):
        model = load_model_config(path)
    checkpoint = _read_checkpoint(args, report)
    with report.phase("import jax"):
        import jax
    with report.phase("find devices"):
        _virtual_cpus(args.data_parallel_size)
        backend = _backend(jax.default_backend)
        devices = _devices(jax.devices(), args.data_parallel_size)
        parts = to_parts(args, model, backend)
    runners = [
        _start_runner(args, checkpoint, model, parts, _Place(device, index, len(devices)), processors, report, progress)
        for index, device in enumerate(devices)
    ]
    report.plan_rows = _plan_rows(runners[0], parts.cache, parts, len(runners))
    cores = tuple(_core(args, checkpoint, parts, r.kv_plan, r, number) for number, r in enumerate(runners))
    built = _assemble(args, checkpoint, parts, cores, model.vocab_size, processors)
    from jaxllm.runner.profiler import JaxProfiler

    return replace(
        built,
        compilations_after_ready=lambda: sum(r.compilations_after_ready for r in runners),
        profiler=JaxProfiler(),
    )


@dataclass(frozen=True, slots=True)
class _Place:
    """One of the devices that hold a copy of the model."""

    device: Any
    index: int
    num_devices: int


def _virtual_cpus(num_devices: int) -> None:
    """Let a CPU stand for several devices, where nothing has used jax yet and nobody asked for more."""
    import jax

    config: Any = jax.config
    if num_devices > 1 and config.jax_num_cpu_devices < num_devices:
        with contextlib.suppress(RuntimeError):  # jax runs already, with the devices it has
            config.update("jax_num_cpu_devices", num_devices)


def _devices(found: Sequence[Any], wanted: int) -> Sequence[Any]:
    if wanted > len(found):
        raise ConfigError(f"data_parallel_size={wanted} needs as many devices; accepted here: at most {len(found)}")
    return found[:wanted]


def _backend(ask: Callable[[], str]) -> Backend:
    try:
        platform = ask()
    except RuntimeError as error:  # JAX_PLATFORMS names none that starts
        raise ConfigError(f"jax finds no device: {error}") from error
    known: dict[str, Backend] = {"cpu": "cpu", "gpu": "gpu", "cuda": "gpu", "rocm": "gpu", "tpu": "tpu"}
    if platform not in known:
        raise ConfigError(f"jax runs on {platform!r}; accepted: cpu, gpu, tpu (see JAX_PLATFORMS)")
    return known[platform]


def _start_runner(
    args: EngineArgs,
    checkpoint: _Checkpoint,
    model: ModelConfig,
    parts: ConfigParts,
    place: _Place,
    processors: Sequence[LogitsProcessor],
    report: StartupReport,
    progress: Progress | None,
) -> Runner:
    with report.phase("import model code"):
        from jaxllm.runner.start import StartOptions, start_runner
        from pallas_kernels import KernelError
    root = args.compilation_cache_dir
    options = StartOptions(
        eos_ids=sorted(checkpoint.eos_ids),
        device=place.device,
        num_devices=place.num_devices,
        cache_dir=Path(root).expanduser() if root else read_environment().cache_dir / "compiled",
        phase=lambda name: report.phase(name if place.index == 0 else f"{name}, device {place.index}"),
        **({} if progress is None else {"progress": progress}),
    )
    try:
        return start_runner(
            model,
            None if args.load_format == "dummy" else checkpoint.path,
            cache=parts.cache,
            scheduler=parts.scheduler,
            dtype=parts.dtype,
            attention=args.attention_implementation,
            dummy_seed=args.seed,
            logprobs=parts.logprobs,
            processors=processors,
            options=options,
        )
    except KernelError as error:  # the kernels know nothing of our errors
        raise ConfigError(f"attention_implementation={args.attention_implementation!r}: {error}") from error


def _core(
    args: EngineArgs,
    checkpoint: _Checkpoint,
    parts: ConfigParts,
    plan: KVCachePlan,
    executor: Executor,
    number: int = 0,
) -> CoreParts:
    scheduler, kv = make_scheduler(
        parts.scheduler, parts.cache, plan, eos_ids=checkpoint.eos_ids, events=args.kv_events is not None
    )
    trace: TraceRecorder | None = None
    if args.record_trace is not None:
        header = Header(parts.scheduler, parts.cache, plan, tuple(sorted(checkpoint.eos_ids)))
        trace = FileRecorder(trace_path(args.record_trace, number), header)
    kv_events: KVEventPublisher | None = None
    if args.kv_events is not None:
        kv_events = ZmqPublisher(args.kv_events, kinds_of(plan), number)
    return CoreParts(executor=executor, scheduler=scheduler, kv=kv, trace=trace, kv_events=kv_events)


def _assemble(
    args: EngineArgs,
    checkpoint: _Checkpoint,
    parts: ConfigParts,
    cores: Sequence[CoreParts],
    vocab_size: int,
    processors: Sequence[LogitsProcessor],
) -> EngineParts:
    first, *others = cores
    return EngineParts(
        executor=first.executor,
        scheduler=first.scheduler,
        kv=first.kv,
        trace=first.trace,
        kv_events=first.kv_events,
        more_cores=tuple(others),
        tokenizer=checkpoint.tokenizer,
        max_model_len=parts.scheduler.max_model_len,
        vocab_size=vocab_size,
        model_name=model_name(args),
        eos_ids=checkpoint.eos_ids,
        default_params=checkpoint.generation.sampling,
        max_logprobs=parts.logprobs.max_logprobs,
        logprobs_mode=parts.logprobs.mode,
        processor_names=tuple(p.name for p in processors),
        seed=args.seed,
        async_scheduling=parts.scheduler.async_scheduling,
        watchdog_s=args.watchdog_s,
    )


def _plan_rows(runner: Runner, cache: CacheConfig, parts: ConfigParts, num_devices: int) -> tuple[tuple[str, str], ...]:
    plan, scheduler = runner.kv_plan, parts.scheduler
    copies = (("devices", f"{num_devices}, each with what follows"),) if num_devices > 1 else ()
    sizes = tuple((name, f"{size / 2**20:,.1f} MiB") for name, size in runner.memory.table())
    return (
        *copies,
        *sizes,
        ("kv page", f"{cache.page_size} tokens, {plan.page_bytes:,} bytes, {cache.dtype}"),
        ("kv pages", f"{plan.num_pages:,} (one is the null page), {plan.capacity_tokens:,} tokens"),
        ("requests at once", f"{scheduler.max_num_seqs}, up to {scheduler.max_model_len:,} tokens each"),
        ("tokens in a step", f"{scheduler.max_num_batched_tokens:,}"),
    )
