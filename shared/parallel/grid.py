"""Pipelines whose stages are divided: rank = stage * tp + part.

The ranks of a stage are neighbours and have parts of its layers: sums over ranks stay among them. The ranks
with the same part of all stages are a pipeline of their own: hidden states, which all ranks of a stage have
as a whole, go from part to part. Replicas that share experts stand in place of stages: tokens go among the
ranks with the same part of all replicas.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from diptych.shared.config import EngineConfig
from diptych.shared.interfaces.collectives import Collectives, Grid

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store


def join_ranks(
    kind: type[Collectives], config: EngineConfig, store: Store, rank: int, seconds: float
) -> Collectives:
    """The group of all ranks, which have joined its `grid` if they form one. All make the groups in this
    order."""
    what, num = ("replica", config.dp) if config.dp_attention else ("stage", config.pp)
    if config.tp == 1 or num == 1:
        return kind(store, rank, config.tp * num, seconds, *(["dp"] if config.dp_attention else []))
    from torch.distributed import PrefixStore

    def group(name: str, rank: int, size: int) -> Collectives:
        return kind(PrefixStore(name, store), rank, size, seconds, name)

    ranks = kind(store, rank, config.tp * num, seconds, "ranks")
    # --8<-- [start:grid-of-ranks]
    stage, part = divmod(rank, config.tp)
    tp = group(f"tp of {what} {stage}", part, config.tp)
    ranks.grid = Grid(tp, group(f"{what}s of part {part}", stage, num))
    # --8<-- [end:grid-of-ranks]
    return ranks


def groups_of(ranks: Collectives) -> tuple[Collectives, ...]:
    """All groups of a rank."""
    return (ranks, *(ranks.grid or ()))


def tp_of(ranks: Collectives, config: EngineConfig) -> Collectives | None:
    """The group of this rank whose ranks have parts of the same layers; None: it has whole layers."""
    if config.tp == 1:
        return None
    return ranks.grid.tp if ranks.grid else ranks


def stages_of(ranks: Collectives) -> Collectives:
    """The pipeline of this rank, or its part of all replicas."""
    return ranks.grid.stages if ranks.grid else ranks
