"""The composition root: from settings to the parts of an engine. The only place brain meets body."""

from __future__ import annotations

import logging
from collections.abc import Callable
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
from jaxllm.config.engine import Backend, CacheConfig, ConfigParts, EngineArgs, to_parts
from jaxllm.config.env import read_environment
from jaxllm.engine.parts import EngineParts
from jaxllm.errors import ConfigError
from jaxllm.memory.manager import KVManager
from jaxllm.memory.plan import KVCachePlan, KVGroup
from jaxllm.memory.spec import FullKV, pages_for
from jaxllm.scheduler.registry import create_policy
from jaxllm.scheduler.scheduler import Scheduler
from jaxllm.scheduler.stop import StopRules
from jaxllm.tokenizer.base import Tokenizer
from jaxllm.tokenizer.chat import ChatTemplate
from jaxllm.tokenizer.load import load_chat_template, load_tokenizer
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
    args: EngineArgs, report: StartupReport | None = None, *, progress: Progress | None = None
) -> EngineParts:
    """Load everything that `args` names; the engine made of the result is ready to serve.

    The phases and the memory plan go into `report`; `progress` hears of weights read and programs
    compiled. With a scripted executor jax is never imported.

    Raises:
        ConfigError: a setting is wrong, or the model is not found.
        UnsupportedModel, WeightsError: the checkpoint is of a kind that is not served, or broken.
        CapacityError: it does not fit into memory.
    """
    report = report or StartupReport()
    policy = create_policy(args.scheduling_policy)  # first: a wrong name costs no time
    if args.scripted_file is not None:
        return _build_scripted(args, args.scripted_file, policy, report)
    return _build_on_device(args, policy, report, progress)


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


def _build_scripted(args: EngineArgs, script: str, policy: Any, report: StartupReport) -> EngineParts:
    from jaxllm.testing.scripted import ScriptedExecutor

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
    plan = _scripted_plan(parts)
    return _assemble(args, checkpoint, parts, plan, executor, policy, tokenizer.vocab_size)


def _scripted_plan(parts: ConfigParts) -> KVCachePlan:
    """Pages for every slot at full length, unless a number is given. Their bytes mean nothing."""
    cache, scheduler = parts.cache, parts.scheduler
    wanted = 1 + scheduler.max_num_seqs * pages_for(scheduler.max_model_len, cache.page_size)
    spec = FullKV(page_size=cache.page_size, num_kv_heads=1, head_dim=1)
    return KVCachePlan((KVGroup((0,), spec),), cache.num_pages or min(wanted, _SCRIPTED_MAX_PAGES), cache.page_size)


def _build_on_device(args: EngineArgs, policy: Any, report: StartupReport, progress: Progress | None) -> EngineParts:
    path = resolve_model(args.model)
    with report.phase("read config"):
        model = load_model_config(path)
    checkpoint = _read_checkpoint(args, report)
    with report.phase("import jax"):
        import jax
    with report.phase("find devices"):
        backend = _backend(jax.default_backend)
        parts = to_parts(args, model, backend)
    runner = _start_runner(args, checkpoint, model, parts, report, progress)
    report.plan_rows = _plan_rows(runner, parts.cache, parts)
    built = _assemble(args, checkpoint, parts, runner.kv_plan, runner, policy, model.vocab_size)
    return replace(built, compilations_after_ready=lambda: runner.stats().compilations_after_ready)


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
    report: StartupReport,
    progress: Progress | None,
) -> Runner:
    with report.phase("import model code"):
        from jaxllm.runner.start import StartOptions, start_runner
        from pallas_kernels import KernelError
    root = args.compilation_cache_dir
    options = StartOptions(
        eos_ids=sorted(checkpoint.eos_ids),
        cache_dir=Path(root).expanduser() if root else read_environment().cache_dir / "compiled",
        phase=report.phase,
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
            options=options,
        )
    except KernelError as error:  # the kernels know nothing of our errors
        raise ConfigError(f"attention_implementation={args.attention_implementation!r}: {error}") from error


def _assemble(
    args: EngineArgs,
    checkpoint: _Checkpoint,
    parts: ConfigParts,
    plan: KVCachePlan,
    executor: Executor,
    policy: Any,
    vocab_size: int,
) -> EngineParts:
    kv = KVManager(plan, enable_prefix_caching=parts.cache.enable_prefix_caching)
    max_model_len = parts.scheduler.max_model_len
    scheduler = Scheduler(parts.scheduler, kv, policy, StopRules(checkpoint.eos_ids, max_model_len))
    return EngineParts(
        executor=executor,
        scheduler=scheduler,
        kv=kv,
        tokenizer=checkpoint.tokenizer,
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        model_name=model_name(args),
        eos_ids=checkpoint.eos_ids,
        default_params=checkpoint.generation.sampling,
        seed=args.seed,
        async_scheduling=parts.scheduler.async_scheduling,
        watchdog_s=args.watchdog_s,
    )


def _plan_rows(runner: Runner, cache: CacheConfig, parts: ConfigParts) -> tuple[tuple[str, str], ...]:
    plan, scheduler = runner.kv_plan, parts.scheduler
    sizes = tuple((name, f"{size / 2**20:,.1f} MiB") for name, size in runner.memory.table())
    return (
        *sizes,
        ("kv page", f"{cache.page_size} tokens, {plan.page_bytes:,} bytes, {cache.dtype}"),
        ("kv pages", f"{plan.num_pages:,} (one is the null page), {plan.capacity_tokens:,} tokens"),
        ("requests at once", f"{scheduler.max_num_seqs}, up to {scheduler.max_model_len:,} tokens each"),
        ("tokens in a step", f"{scheduler.max_num_batched_tokens:,}"),
    )
