"""From a model and a checkpoint to a Runner that is ready: weights, memory plan, programs, pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import jax

from jaxllm.config.engine import CacheConfig, LogprobsConfig, SchedulerConfig
from jaxllm.memory.spec import pages_for
from jaxllm.runner.batch_builder import SCORE_ROWS, BatchBuilder
from jaxllm.runner.buckets import Buckets, build_buckets
from jaxllm.runner.executable_store import ExecutableStore, Program
from jaxllm.runner.kv_buffers import Device, DeviceShapes, HeadShape, allocate
from jaxllm.runner.memory_plan import MemoryPlan, logprob_bytes, plan_pages, total_memory, weights_bytes
from jaxllm.runner.runner import Runner
from jaxllm.runner.side_programs import side_specs
from jaxllm.runner.slots import Slots
from jaxllm.runner.step import SampleVariant, SamplingSetup, forward_spec, sample_spec
from jaxllm.runner.warmup import Programs, ProgramSpecs, cache_folder, compile_all
from jaxllm.sampling.logprobs import LogprobsSpec
from jaxllm.types.processors import LogitsProcessor
from jaxllm.types.step import ScheduledRows, SchedulerOutput

if TYPE_CHECKING:
    from jaxllm.config.model import ModelConfig
    from jaxllm.memory.plan import KVCachePlan
    from jaxllm.models.base import SplitModel

Phase = Callable[[str], AbstractContextManager[object]]
Progress = Callable[[str, int, int], None]  # (phase, done, total)
PROBE_PAGES = 16  # temporaries do not depend on the number of pages: the KV arrays are aliased
WARM_UP_STEP = -1


def _no_phase(name: str) -> AbstractContextManager[object]:
    return nullcontext(name)


def _no_progress(phase: str, done: int, total: int) -> None:
    """Nobody watches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartOptions:
    """What start-up needs beside the model and the engine's own settings."""

    eos_ids: Sequence[int] = ()
    device: Device | None = None  # None: jax's first
    num_devices: int = 1  # Runners of this process that share the host's memory, where that is the device's
    cache_dir: Path | None = None  # root of the store of compiled programs; None: none
    phase: Phase = _no_phase  # entered around "plan", "weights", "compile", "allocate"; the middle two at the same time
    progress: Progress = _no_progress


def start_runner(
    model_config: ModelConfig,
    path: Path | None,
    *,
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    dtype: str,
    attention: str | None = None,
    dummy_seed: int = 0,
    logprobs: LogprobsConfig = LogprobsConfig(),  # noqa: B008 frozen
    processors: Sequence[LogitsProcessor] = (),
    options: StartOptions | None = None,
) -> Runner:
    """Build, load, plan, compile and allocate; the Runner that comes back compiles nothing more.

    `path` None gives weights drawn from `dummy_seed`. `dtype` is that of the weights and activations,
    `attention` the kernel implementation (None: the platform's best), `processors` what requests may
    name in `extra_args`.

    Raises:
        WeightsError, UnsupportedModel: the checkpoint does not hold this model.
        CapacityError, ConfigError: the memory plan does not come out.
    """
    from jaxllm.models.base import split_model

    options = options or StartOptions()
    model = split_model(model_config, dtype, attention)
    return start_split_model(
        model,
        partial(_load, model, path, dummy_seed, options),
        head=HeadShape(model_config.hidden_size, model_config.vocab_size, dtype),
        cache=cache,
        scheduler=scheduler,
        min_rows=1 if dtype == "float32" or model.matrices == "whole" else 2,
        cache_key=(model_config, dtype),
        logprobs=logprobs,
        processors=processors,
        options=options,
    )


def _load(model: SplitModel, path: Path | None, dummy_seed: int, options: StartOptions) -> dict[str, jax.Array]:
    sharding = jax.sharding.SingleDeviceSharding(options.device or jax.devices()[0])
    params = {n: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=sharding) for n, p in model.params.items()}
    if path is None:
        from jaxllm.weights.dummy import dummy_weights

        return dummy_weights(params, dummy_seed)
    from jaxllm.weights.load import load_weights

    return load_weights(path, model.tensors, params, progress=partial(options.progress, "weights"))


def start_split_model(
    model: SplitModel,
    load: Callable[[], dict[str, jax.Array]],
    *,
    head: HeadShape,
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    min_rows: int = 1,
    cache_key: object = None,
    logprobs: LogprobsConfig = LogprobsConfig(),  # noqa: B008 frozen
    processors: Sequence[LogitsProcessor] = (),
    options: StartOptions | None = None,
) -> Runner:
    """`start_runner` for a model that is built already. `load` gives its weights, on another thread.

    `min_rows`: fewest rows of a program; XLA's matmul of one bfloat16 row is slow on CPUs.
    """
    options = options or StartOptions()
    device = options.device or jax.devices()[0]
    num_top = head.vocab_size if logprobs.max_logprobs < 0 else min(logprobs.max_logprobs, head.vocab_size)
    setup = SamplingSetup(head, LogprobsSpec(num_top, logprobs.mode), tuple(processors))
    start = _Start(model, setup, cache, scheduler, min_rows, device)
    folder = cache_folder(options.cache_dir, device, cache_key)
    with options.phase("plan"):
        budget_bytes = total_memory(device, cache.memory_utilization, options.num_devices)
        kv_plan = start.plan(budget_bytes)
        shapes = start.shapes(kv_plan.num_pages)
    weights, programs = _load_and_compile(load, partial(start.compile, shapes, folder, cache_key), options)
    with options.phase("allocate"):
        names = [processor.name for processor in processors]
        slots = Slots(scheduler.max_num_seqs, scheduler.max_model_len, options.eos_ids, names)
        memory = start.memory(shapes, programs, slots, budget_bytes)
        memory.check()
        runner = Runner(
            model,
            weights,
            programs,
            allocate(shapes, device),
            start.builder,
            start.buckets,
            slots,
            kv_plan,
            memory,
            head.vocab_size,
        )
        runner.collect(runner.submit(empty_step(WARM_UP_STEP)))
    runner.ready()
    return runner


def empty_step(step_id: int) -> SchedulerOutput:
    """A step of padding alone: it changes nothing, and shows that dispatch works before a request needs it."""
    import numpy as np

    none = np.zeros(0, np.int32)
    rows = ScheduledRows((), none, none, none, np.zeros(0, np.bool_), 0)
    return SchedulerOutput(step_id=step_id, new=(), rows=rows, page_diffs=())


def _load_and_compile(
    load: Callable[[], dict[str, jax.Array]],
    compile: Callable[[Callable[[int, int], None]], Programs],
    options: StartOptions,
) -> tuple[dict[str, jax.Array], Programs]:
    """Reading weights waits for the disk and compiling for XLA: they share the time."""

    def load_in_phase() -> dict[str, jax.Array]:
        with options.phase("weights"):
            return load()

    with ThreadPoolExecutor(1, "jaxllm-load") as pool:
        weights = pool.submit(load_in_phase)

        def progress(done: int, total: int) -> None:
            if weights.done():
                weights.result()  # a broken checkpoint is told at once, not after the last program
            options.progress("compile", done, total)

        with options.phase("compile"):
            programs = compile(progress)
        return weights.result(), programs


@dataclass(frozen=True, slots=True)
class _Start:
    """The pieces of start-up that depend on the same six things."""

    model: SplitModel
    setup: SamplingSetup
    cache: CacheConfig
    scheduler: SchedulerConfig
    min_rows: int
    device: Device

    @property
    def pages_per_request(self) -> int:
        return pages_for(self.scheduler.max_model_len, self.cache.page_size)

    @property
    def buckets(self) -> Buckets:
        s = self.scheduler
        return build_buckets(s.max_num_seqs, s.max_num_batched_tokens, self.pages_per_request, min_rows=self.min_rows)

    @property
    def builder(self) -> BatchBuilder:
        return BatchBuilder(self.buckets, self.cache.page_size, self.scheduler.max_num_seqs)

    def shapes(self, num_pages: int) -> DeviceShapes:
        return DeviceShapes.of(
            self.model,
            self.setup.head,
            num_pages=num_pages,
            page_size=self.cache.page_size,
            kv_dtype=self.cache.dtype,
            num_slots=self.scheduler.max_num_seqs,
            pages_per_request=self.pages_per_request,
            max_model_len=self.scheduler.max_model_len,
            max_num_tokens=self.buckets.max_num_tokens,
        )

    def compile(
        self, shapes: DeviceShapes, folder: Path | None, key: object, progress: Callable[[int, int], None]
    ) -> Programs:
        """Every program, through the store in `folder`. `key` tells this model from others."""
        store = ExecutableStore(folder, self.device, (key, self.model.attention))
        layouts, page_size = self.builder.layouts, self.cache.page_size
        forward = {b: forward_spec(self.model, layout, shapes, page_size) for b, layout in layouts.items()}
        sample = {v: sample_spec(self.model, self.setup, shapes, v) for v in self.sample_variants}
        specs = ProgramSpecs(forward, sample, side_specs(self.model, self.setup, shapes))
        return compile_all(specs, self.device, store, progress=progress)

    @property
    def sample_variants(self) -> Iterator[SampleVariant]:
        for num_rows in self.buckets.sample_sizes:
            yield SampleVariant(num_rows, greedy=True)
            yield SampleVariant(num_rows, greedy=False)
            yield SampleVariant(num_rows, greedy=False, with_logprobs=True)

    def plan(self, budget_bytes: int) -> KVCachePlan:
        return plan_pages(
            self.model,
            self.cache,
            max_num_seqs=self.scheduler.max_num_seqs,
            max_model_len=self.scheduler.max_model_len,
            device=self.device,
            budget_bytes=budget_bytes,
            probe_temporaries=self.probe_temporaries,
        )

    def probe_temporaries(self) -> int:
        """Bytes beside weights and pages: the largest temporary, from the largest programs over a few pages."""
        shapes, buckets = self.shapes(PROBE_PAGES), self.buckets
        layout = self.builder.layouts[buckets.forward[-1]]
        num_rows = max(buckets.sample_sizes[-1], SCORE_ROWS)  # logits of this many rows, whether sampled or scored
        specs = (
            forward_spec(self.model, layout, shapes, self.cache.page_size),
            sample_spec(self.model, self.setup, shapes, SampleVariant(num_rows, greedy=False, with_logprobs=True)),
        )
        largest = max(Program.of(spec.trace(self.device).lower().compile()).temporary_bytes for spec in specs)
        return largest + shapes.table_bytes + shapes.sampling_bytes + self.logprob_bytes

    @property
    def logprob_bytes(self) -> int:
        """Of the results that wait for the host: those of two steps, every row sampled or scored with top entries."""
        num_rows = self.buckets.max_num_tokens + self.buckets.sample_sizes[-1]
        return 2 * logprob_bytes(num_rows, self.setup.logprobs.num_top)

    def memory(self, shapes: DeviceShapes, programs: Programs, slots: Slots, budget_bytes: int) -> MemoryPlan:
        host_bytes = slots.num_bytes if self.device.platform == "cpu" else 0  # elsewhere not the device's memory
        rows = (
            ("weights", weights_bytes(self.model)),
            ("kv pages", shapes.kv_bytes),
            ("largest temporary", programs.largest_temporary_bytes),
            ("sampling tables and hidden rows", shapes.sampling_bytes),
            ("log probabilities", self.logprob_bytes),
            ("page tables and host buffers", shapes.table_bytes + host_bytes),
        )
        return MemoryPlan(rows, budget_bytes)
