"""Runs ranks as threads of this process, which start much faster than processes."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Lock
from typing import Any, TypeVar

from diptych.shared import registry
from diptych.shared.config import EngineConfig
from diptych.shared.interfaces import Collectives
from diptych.shared.parallel.grid import join_ranks

T = TypeVar("T")
SECONDS = 60.0


def on_ranks(
    size: int,
    function: Callable[[Collectives], T],
    seconds: float = SECONDS,
    impl: type[Collectives] | None = None,
    *,
    config: EngineConfig | None = None,
    ends_together: bool = True,
    in_turn: bool = False,
) -> list[T]:
    """Run `function` on each of `size` ranks and return the results in the order of ranks. The first error of
    a rank is raised: its group ends, which raises on the other ranks too. `impl`: the reference if None.
    `ends_together`: a rank that has returned stays connected until all have; otherwise its group ends
    immediately. `config`: the ranks form its grid. `in_turn`: one rank computes while the others are in a
    collective, for Triton's interpreter, which cannot run two kernels at a time."""
    from torch.distributed import HashStore

    store, chosen = HashStore(), impl or registry.load("collectives", "reference")
    turn = Lock()
    if in_turn:
        chosen = _in_turn(chosen, turn)
    errors: list[BaseException] = []
    connected = Barrier(size)  # a rank that ends early would break the group of ranks that still connect
    kept: list[Collectives] = []

    def use(rank: int) -> T:
        if config is None:
            group = chosen(store, rank, size, seconds)
        else:
            group = join_ranks(chosen, config, store, rank, seconds)
        connected.wait(seconds)
        with turn if in_turn else contextlib.nullcontext():
            result = function(group)
        if ends_together:
            kept.append(group)
        return result

    def run(rank: int) -> T | None:
        try:
            return use(rank)
        except BaseException as error:
            connected.abort()
            errors.append(error)
            traceback.clear_frames(error.__traceback__)  # they hold the group, which ends now
            return None

    with ThreadPoolExecutor(size, thread_name_prefix="rank") as pool:
        results = list(pool.map(run, range(size)))
    if errors:
        raise errors[0]
    return results


def _in_turn(impl: type[Collectives], turn: Lock) -> type[Collectives]:
    """Collectives of ranks that hold `turn` outside of them."""

    class InTurn(impl):  # type: ignore[misc, valid-type]
        _meanwhile: Callable[[], None] | None = None

        @property
        def meanwhile(self) -> Callable[[], None] | None:
            return self._meanwhile and self._run_meanwhile

        @meanwhile.setter
        def meanwhile(self, function: Callable[[], None] | None) -> None:
            self._meanwhile = function

        def _run_meanwhile(self) -> None:
            assert self._meanwhile is not None
            with turn:
                self._meanwhile()

        def _finish(self, *args: Any) -> None:
            turn.release()
            try:
                super()._finish(*args)
            finally:
                turn.acquire()

    return InTurn
