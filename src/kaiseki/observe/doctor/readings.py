"""What two looks at a metrics page say: counters as growth, histograms as quantiles, gauges as they are."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

Labels = frozenset[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Scrape:
    """One metrics page.

    Attributes:
        at_s: when it was read.
        samples: value by sample name and labels.
    """

    at_s: float
    samples: Mapping[str, Mapping[Labels, float]]


def parse(page: str, at_s: float = 0.0) -> Scrape:
    """Read a page in Prometheus' text format.

    Raises:
        ValueError: it is none.
    """
    samples: dict[str, dict[Labels, float]] = defaultdict(dict)
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            samples[sample.name][frozenset(sample.labels.items())] = sample.value
    if not samples:
        raise ValueError("the page has no metrics")
    return Scrape(at_s, samples)


class Readings:
    """The time between two scrapes of one server; with one scrape, all since it started."""

    def __init__(self, now: Scrape, before: Scrape | None = None) -> None:
        self._now = now
        self._before = before

    @property
    def seconds(self) -> float | None:
        """Between the scrapes; None when there is only one."""
        return None if self._before is None else self._now.at_s - self._before.at_s

    def has(self, name: str) -> bool:
        """Whether the server exports a sample of this name."""
        return name in self._now.samples

    def gauge(self, name: str, **labels: str) -> float | None:
        """Newest value, summed over labels not given; None when it is not exported."""
        values = [v for k, v in self._now.samples.get(name, {}).items() if labels.items() <= set(k)]
        return sum(values) if values else None

    def least(self, name: str) -> float | None:
        """The smaller of a gauge's values at both scrapes."""
        values = [
            sum(scrape.samples[name].values())
            for scrape in (self._now, self._before)
            if scrape is not None and name in scrape.samples
        ]
        return min(values, default=None)

    def label_values(self, name: str, label: str) -> set[str]:
        """Values of a label, newest scrape."""
        return {dict(key).get(label, "") for key in self._now.samples.get(name, {})}

    def grew(self, name: str, **labels: str) -> float:
        """How much a counter grew, summed over labels not given; 0 when it is not exported."""
        return sum(v for k, v in self._growth(name).items() if labels.items() <= set(k))

    def grew_before(self, name: str) -> float:
        """What a counter had reached at the first of two scrapes."""
        return 0.0 if self._before is None else sum(self._before.samples.get(name, {}).values())

    def grew_by(self, name: str, label: str) -> dict[str, float]:
        """How much a counter grew for each value of a label, the most first; without those that did not."""
        sums: dict[str, float] = defaultdict(float)
        for key, value in self._growth(name).items():
            sums[dict(key).get(label, "")] += value
        return dict(sorted(((k, v) for k, v in sums.items() if v > 0), key=lambda item: -item[1]))

    def quantile(self, name: str, q: float, **labels: str) -> float | None:
        """Upper bound of the histogram's bucket in which the q-th quantile is; None without values."""
        buckets: dict[float, float] = defaultdict(float)
        for key, value in self._growth(f"{name}_bucket").items():
            found = dict(key)
            if labels.items() <= found.items():
                buckets[float(found["le"])] += value
        total = buckets.get(math.inf, 0.0)
        if total <= 0:
            return None
        finite = sorted(edge for edge in buckets if edge < math.inf)
        for edge in finite:
            if buckets[edge] >= q * total:
                return edge
        return finite[-1] if finite else None

    def mean(self, name: str, **labels: str) -> float | None:
        """Mean of a histogram's values; None without any."""
        count = self.grew(f"{name}_count", **labels)
        return self.grew(f"{name}_sum", **labels) / count if count > 0 else None

    def _growth(self, name: str) -> dict[Labels, float]:
        before = self._before.samples.get(name, {}) if self._before is not None else {}
        now = self._now.samples.get(name, {})
        # A counter that fell belongs to a server that was started anew meanwhile.
        return {key: value - before.get(key, 0.0) if value >= before.get(key, 0.0) else value
                for key, value in now.items()}  # fmt: skip
