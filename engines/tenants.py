"""Names that clients choose, kept within bounds: how fast each tenant may send, and under which label it is
counted."""

from __future__ import annotations

OTHER = "other"


class TenantRates:
    """A token bucket for each tenant: `rate` requests per second, `burst` at once. Times are seconds of any
    clock that does not go back."""

    SWEEP = 1024  # buckets, before those that are full again are dropped: a full one is as good as none

    def __init__(self) -> None:
        self._buckets: dict[str, tuple[float, float]] = {}  # tokens, and when they were counted
        self._sweep_at = self.SWEEP

    def wait_s(self, tenant: str, rate: float | None, burst: int | None, now: float) -> float:
        """Until it may send another request; 0.0: it may now."""
        if rate is None:
            return 0.0
        lacking = 1.0 - self._tokens(tenant, rate, _size(rate, burst), now)
        return lacking / rate if lacking > 1e-9 else 0.0

    def take(self, tenant: str, rate: float | None, burst: int | None, now: float) -> None:
        """It has sent one."""
        if rate is None:
            return
        size = _size(rate, burst)
        self._buckets[tenant] = (self._tokens(tenant, rate, size, now) - 1.0, now)
        if len(self._buckets) > self._sweep_at:
            full = [name for name in self._buckets if self._tokens(name, rate, size, now) >= size]
            for name in full:
                del self._buckets[name]
            self._sweep_at = max(self.SWEEP, 2 * len(self._buckets))

    def _tokens(self, tenant: str, rate: float, size: float, now: float) -> float:
        tokens, at = self._buckets.get(tenant, (size, now))
        return min(size, tokens + max(0.0, now - at) * rate)


def _size(rate: float, burst: int | None) -> float:
    return float(burst) if burst is not None else max(1.0, rate)


class Labels:
    """The first `most` names keep their own label, all later ones share `other`: a client that makes up names
    must not make the metrics grow."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: set[str] = set()

    def of(self, name: str) -> str:
        if name not in self._known:
            if len(self._known) >= self._most:
                return OTHER
            self._known.add(name)
        return name
