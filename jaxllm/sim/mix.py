"""Who sends requests, what they ask for, and how they wish to be served."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

from jaxllm.sim.lengths import Pairs
from jaxllm.sim.prompts import Prompts
from jaxllm.sim.workload import Arrival
from jaxllm.types.service import DEFAULT_SERVICE, ServiceParams


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestClass:
    """One kind of request: of a tenant, with its priority and its targets."""

    weight: float = 1.0  # its share of the requests, relative to the other classes
    priority: int = 0
    service: ServiceParams = DEFAULT_SERVICE
    cache_salt: str | None = None
    pairs: Pairs | None = None  # lengths; None: the workload's


@dataclass(frozen=True, slots=True)
class Prefixes:
    """Beginnings that prompts share, before what is their own."""

    count: int
    num_tokens: int
    skew: float = 0.0  # the k-th most frequent one is used 1 / k**skew as often as the first


class Choice:
    """Draws one of several by weight. Frozen in effect."""

    def __init__(self, weights: Sequence[float]) -> None:
        self._ends = list(itertools.accumulate(weights))
        self._range = range(len(self._ends))

    def draw(self, rng: random.Random) -> int:
        if len(self._ends) == 1:
            return 0
        return rng.choices(self._range, cum_weights=self._ends)[0]


class Mix:
    """Makes requests, by their number. Mutable; of one workload, asked for each number once and in order.

    Lengths, classes and prefixes are drawn apart, so that changing one leaves the others as they are.
    """

    def __init__(
        self,
        seed: int,
        *,
        pairs: Pairs | None = None,
        classes: Sequence[RequestClass] = (RequestClass(),),
        prefixes: Prefixes | None = None,
        prediction_sigma: float | None = None,
    ) -> None:
        """`pairs` may be None if each class has its own, or `sized` alone is called. `prediction_sigma`:
        requests say how long their answers will be, wrong by a lognormal factor; None: they do not."""
        self.prompts = Prompts(seed)
        self._pairs = pairs
        self._classes = tuple(classes)
        self._prefixes = prefixes
        self._sigma = prediction_sigma
        self._which_class = Choice([each.weight for each in classes])
        self._which_prefix = Choice([(k + 1) ** -prefixes.skew for k in range(prefixes.count)] if prefixes else [1.0])
        names = ("lengths", "classes", "prefixes", "predictions")
        self._lengths_rng, self._class_rng, self._prefix_rng, self._prediction_rng = (
            random.Random(f"{seed}/{name}") for name in names
        )

    def request(self, number: int, at_s: float) -> Arrival:
        """A request whose lengths are drawn.

        Raises:
            ValueError: neither its class nor the mix says how long it is.
        """
        kind = self.pick_class()
        pairs = kind.pairs or self._pairs
        if pairs is None:
            raise ValueError("a class without lengths in a mix without lengths")
        return self._arrival(kind, number, at_s, *pairs.draw(self._lengths_rng))

    def sized(self, number: int, at_s: float, num_prompt: int, num_output: int) -> Arrival:
        """A request of known lengths."""
        return self._arrival(self.pick_class(), number, at_s, num_prompt, num_output)

    def pick_class(self) -> RequestClass:
        return self._classes[self._which_class.draw(self._class_rng)]

    def service(self, kind: RequestClass, num_output: int) -> ServiceParams:
        """How a request of this class, answered with so many tokens, wishes to be served."""
        if self._sigma is None:
            return kind.service
        said = num_output * self._prediction_rng.lognormvariate(0.0, self._sigma)
        return dataclasses.replace(kind.service, predicted_tokens=max(1, round(min(said, 2**31 - 1))))

    def _arrival(self, kind: RequestClass, number: int, at_s: float, num_prompt: int, num_output: int) -> Arrival:
        prompt_ids = self.prompts.fresh(number, num_prompt)
        if self._prefixes is not None:
            which = self._which_prefix.draw(self._prefix_rng)
            prompt_ids = self.prompts.shared(f"prefix {which}", self._prefixes.num_tokens) + prompt_ids
        return Arrival(
            at_s,
            f"r{number}",
            prompt_ids,
            num_output,
            kind.priority,
            self.service(kind, num_output),
            kind.cache_salt,
        )
