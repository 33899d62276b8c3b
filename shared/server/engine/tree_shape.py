"""The shape of a prefix tree, without the text of any prompt."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from diptych.shared.interfaces.prefix_cache import CacheNode


def shape_of_tree(nodes: Iterable[CacheNode], max_nodes: int, max_tokens: int) -> dict[str, Any]:
    """The first nodes, in their order; `is_cut`: there are more."""
    found: list[dict[str, int]] = []
    num_tokens = 0
    for node in nodes:
        if len(found) == max_nodes or num_tokens > max_tokens:
            return {"nodes": found, "is_cut": True}
        num_tokens += len(node.slots)
        found.append(
            {
                "id": node.node_id,
                "parent": node.parent_id,
                "num_tokens": len(node.slots),
                "lock_ref": node.lock_ref,
            }
        )
    return {"nodes": found, "is_cut": False}
