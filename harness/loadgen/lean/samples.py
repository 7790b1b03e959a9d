"""A bounded, evenly spaced sample of a stream of values."""

from __future__ import annotations


class Samples:
    """Keeps every k-th value, with k doubled whenever `limit` (even) values are held: so between limit/2 and
    limit of them, spread evenly over the whole stream, for one comparison each."""

    __slots__ = ("_every", "_limit", "_skip", "values")

    def __init__(self, limit: int) -> None:
        self.values: list[int] = []
        self._limit = limit
        self._every = 1
        self._skip = 0  # values to pass over until the next one that is kept

    def add(self, value: int) -> None:
        if self._skip:
            self._skip -= 1
            return
        self.values.append(value)
        self._skip = self._every - 1
        if len(self.values) == self._limit:
            del self.values[1::2]
            self._every *= 2

    def as_ms(self) -> tuple[float, ...]:
        """The values, which are ns, as ms."""
        return tuple(round(value / 1e6, 4) for value in self.values)
