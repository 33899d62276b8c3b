"""Seeded choices that give the same sequence on every Python version."""

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Dice:
    """A random source built on `random.Random.random()` alone.

    Python promises that method's sequence for a seed, and no such thing for `choice`, `sample` or `shuffle`.
    """

    def __init__(self, *seed: int | str) -> None:
        self._random = random.Random("/".join(str(part) for part in seed)).random

    def below(self, stop: int) -> int:
        """An integer in [0, stop)."""
        return int(self._random() * stop)

    def between(self, low: int, high: int) -> int:
        """An integer in [low, high], both ends included."""
        return low + self.below(high - low + 1)

    def chance(self, probability: float) -> bool:
        return self._random() < probability

    def pick(self, items: Sequence[T]) -> T:
        return items[self.below(len(items))]

    def pick_weighted(self, items: Sequence[T], weights: Sequence[float]) -> T:
        point = self._random() * sum(weights)
        for item, weight in zip(items, weights):
            point -= weight
            if point < 0:
                return item
        return items[-1]

    def shuffled(self, items: Sequence[T]) -> list[T]:
        """A permuted copy (Fisher-Yates)."""
        result = list(items)
        for last in range(len(result) - 1, 0, -1):
            other = self.below(last + 1)
            result[last], result[other] = result[other], result[last]
        return result
