"""The numbers of /metrics, in the text format of Prometheus."""

import threading
from bisect import bisect_left
from collections import Counter

# Upper bounds of the histograms, in seconds.
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Histogram:
    """How many values lie below each of BUCKETS.

    Example: histogram.add(0.2) counts in all buckets from 0.25 on.
    """

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS) + 1)
        self.sum = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BUCKETS, seconds)] += 1
        self.sum += seconds

    def lines(self, name: str) -> list[str]:
        lines = [f"# TYPE {name} histogram"]
        total = 0
        for bound, count in zip((*BUCKETS, "+Inf"), self.counts):
            total += count
            lines.append(f'{name}_bucket{{le="{bound}"}} {total}')
        return [*lines, f"{name}_sum {self.sum:.6f}", f"{name}_count {total}"]


class ServerMetrics:
    """Counts of requests and tokens, and how long clients wait.

    Example: metrics.request("/v1/completions", 200, seconds=0.8, first_token=0.05).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: Counter = Counter()
        self._first = Histogram()
        self._whole = Histogram()

    def request(
        self, path: str, status: int, seconds: float, first_token: float | None = None
    ) -> None:
        """Counts one answered request."""
        with self._lock:
            self._requests[path, status] += 1
            self._whole.add(seconds)
            if first_token is not None:
                self._first.add(first_token)

    def text(self, gauges: dict[str, float], counters: dict[str, float]) -> str:
        """All numbers. gauges and counters: those that others count, by name."""
        lines = []
        with self._lock:
            lines.append("# TYPE tunix_lite_requests_total counter")
            for (path, status), count in sorted(self._requests.items()):
                labels = f'path="{path}",status="{status}"'
                lines.append(f"tunix_lite_requests_total{{{labels}}} {count}")
            lines += self._first.lines("tunix_lite_time_to_first_token_seconds")
            lines += self._whole.lines("tunix_lite_request_seconds")
        for kind, values in (("gauge", gauges), ("counter", counters)):
            for name, value in values.items():
                lines += [f"# TYPE tunix_lite_{name} {kind}", f"tunix_lite_{name} {value:g}"]
        return "\n".join(lines) + "\n"
