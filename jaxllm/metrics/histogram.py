"""A histogram that is told of each token, and so must cost next to nothing."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client.core import Metric


class PlainHistogram:
    """Counts by bucket, without the locks and the walk over all buckets of the client library's own.

    A collector for one registry. Mutable; written by one thread. A scrape from another one may see an
    observation in its bucket and not yet in the sum.
    """

    def __init__(self, name: str, text: str, *, buckets: Iterable[float], labels: Sequence[tuple[str, str]]) -> None:
        """`buckets` are upper bounds, inclusive and rising; the one without a bound is added."""
        self._name = name
        self._text = text
        self._labels = tuple(labels)
        self._bounds = [float(bound) for bound in buckets]
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import HistogramMetricFamily
        from prometheus_client.utils import floatToGoString  # pyright: ignore[reportUnknownVariableType]

        names, values = [name for name, _ in self._labels], [value for _, value in self._labels]
        family = HistogramMetricFamily(self._name, self._text, labels=names)
        bounds = [floatToGoString(bound) for bound in (*self._bounds, float("inf"))]
        buckets = list(zip(bounds, accumulate(self._counts), strict=True))
        family.add_metric(values, buckets, sum_value=self._sum)
        yield family
