"""Any order of adding, leaving and stepping: every request ends once, and everything is given back."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.engine.clock import ManualClock
from jaxllm.engine.core import EngineCore
from jaxllm.engine.messages import AbortRequests, AddRequest, StepDeltas
from jaxllm.engine.outputs import OutputProcessor
from jaxllm.engine.siblings import split_siblings
from jaxllm.metrics.stats import NoObserver
from jaxllm.types.outputs import RequestOutput
from jaxllm.types.sampling import OutputKind, SamplingParams
from tests.helpers.scripted_engine import TOKENIZER, Settings, make_parts, script, scripted


@dataclass
class Machine:
    """Front end and core without threads: messages are handed over by the one that steps."""

    is_async: bool
    endings: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    added: int = 0

    def __post_init__(self) -> None:
        executor = scripted(script("short", prompt_contains="s"), default=script("tick q;r tock ", repeat=True))
        config = Settings(num_pages=14, max_num_seqs=3, max_num_batched_tokens=9, max_model_len=30)
        self.parts = make_parts(executor, config)
        self.core = EngineCore(
            executor, self.parts.scheduler, self.parts.kv, ManualClock(), async_scheduling=self.is_async
        )
        self.outputs = OutputProcessor(TOKENIZER, NoObserver())

    def add(self, n: int, prompt: str, params: SamplingParams) -> None:
        name = f"r{self.added}"
        self.added += 1
        message = AddRequest(name, tuple(prompt.encode()), params, 0.0, seed=1)
        siblings = split_siblings(message, f"{name}#{self.added}")
        self.outputs.open(message, [each.request_id for each in siblings], None, lambda news: self.hear(name, news))
        refusals = [refusal for each in siblings if (refusal := self.core.add(each)) is not None]
        self.take_in(StepDeltas(tuple(refusals), self.core.stats()))
        assert len(siblings) == n

    def hear(self, name: str, news: RequestOutput | Exception) -> None:
        if isinstance(news, Exception):
            raise news
        assert self.endings[name] == 0, "nothing comes after the end"
        self.endings[name] += news.finished
        if news.finished:
            self.reasons.update(c.finish_reason for c in news.outputs)

    def abort(self, number: int) -> None:
        for ids in self.outputs.abort((f"r{number}",), 1.0).values():
            self.core.abort(AbortRequests(tuple(ids)))

    def step(self) -> None:
        stepped = self.core.step()
        if stepped is not None:
            self.take_in(stepped)

    def take_in(self, deltas: StepDeltas) -> None:
        dropped = self.outputs.process(deltas, 1.0)
        if dropped:
            self.core.abort(AbortRequests(tuple(dropped)))

    def check_all_is_back(self) -> None:
        for _ in range(3000):
            if not self.core.has_work:
                break
            self.step()
        assert not self.core.has_work
        assert self.endings == {f"r{number}": 1 for number in range(self.added)}
        assert sum(self.outputs.totals.finished.values()) == self.added
        assert (self.outputs.num_open, self.outputs.loads, self.outputs._sequences) == (0, [0], {})
        assert (self.parts.scheduler.num_running, self.parts.scheduler.num_waiting) == (0, 0)
        assert self.parts.scheduler.requests == {}
        self.parts.kv.check()
        assert self.parts.kv.num_free_pages == self.parts.kv.num_pages - 1


adds = st.tuples(
    st.just("add"),
    st.integers(1, 4),
    st.sampled_from(["s", "p", "long prompt", "a much longer prompt"]),
    st.sampled_from([{}, {"stop": ["q;r"]}, {"max_tokens": 1}, {"max_tokens": 6, "logprobs": 1, "prompt_logprobs": 1}]),
    st.sampled_from(list(OutputKind)),
)
aborts = st.tuples(st.just("abort"), st.integers(0, 12))
steps = st.tuples(st.just("step"), st.integers(1, 6))


@settings(deadline=None)
@given(st.booleans(), st.lists(adds | aborts | steps, max_size=25))
def test_sch_01_any_interleaving_gives_everything_back(is_async: bool, actions: list[tuple]) -> None:  # type: ignore[type-arg]
    machine = Machine(is_async)
    for action in actions:
        match action:
            case ("add", n, prompt, params, kind):
                machine.add(n, prompt, SamplingParams(**{"max_tokens": 25, **params}, n=n, output_kind=kind))
            case ("abort", number):
                machine.abort(number)
            case ("step", count):
                for _ in range(count):
                    machine.step()
    machine.check_all_is_back()


def test_sch_01_two_siblings_left_in_every_phase() -> None:
    """After every number of steps, alone and behind a queue: before the first step, in the prompt, forked, running."""
    for is_async in (False, True):
        for others in (0, 2):
            for count in range(20):
                machine = Machine(is_async)
                for _ in range(others):
                    machine.add(2, "before them", SamplingParams(n=2, max_tokens=8))
                machine.add(2, "a long prompt in pieces", SamplingParams(n=2, max_tokens=9))
                for _ in range(count):
                    machine.step()
                machine.abort(others)
                machine.check_all_is_back()
                assert sum(machine.reasons.values()) == 2 * (others + 1)
                assert machine.reasons["error"] == 0
