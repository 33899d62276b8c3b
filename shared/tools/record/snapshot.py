"""The state of an engine between two steps: queue, pages and radix tree, as the page shows them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from diptych.shared.engine.llm import LLM
from diptych.shared.types import Req

MAX_NODE_TEXT = 160  # characters
MARKS = {"<|im_start|>": "‹start›", "<|im_end|>": "‹end›", "\n": "↵"}


def shown(llm: LLM, token_ids: Sequence[int]) -> str:
    """Tokens as text; their ids where the model has no tokenizer."""
    if llm.tokenizer is None:
        return " ".join(map(str, token_ids))
    text: str = llm.tokenizer.decode(list(token_ids), skip_special_tokens=False)
    for token, mark in MARKS.items():
        text = text.replace(token, mark)
    return text


def shortened(text: str) -> str:
    if len(text) <= MAX_NODE_TEXT:
        return text
    return f"{text[: MAX_NODE_TEXT * 2 // 3]} … {text[-MAX_NODE_TEXT // 3 :]}"


def page_tables(llm: LLM, reqs: Sequence[Req]) -> dict[str, list[int]]:
    """The pages of each request, in the order of its tokens."""
    parts = llm.assembly.parts
    page_size, tables = parts.allocator.page_size, {}
    for req in reqs:
        if req.req_pool_idx is not None:
            slots = parts.req_to_token_pool.read(req.req_pool_idx, 0, req.kv_allocated_len).tolist()
            tables[req.rid] = list(dict.fromkeys(slot // page_size for slot in slots))
    return tables


def cached_pages(llm: LLM) -> set[int]:
    """The pages of the prefix cache."""
    parts = llm.assembly.parts
    return {slot // parts.allocator.page_size for node in parts.tree_cache.nodes() for slot in node.slots}


def tree_of(llm: LLM, before: Sequence[list[Any]]) -> list[list[Any]]:
    """Nodes in the order of an outline: [id, parent, text, tokens, locks, change], where change says what has
    happened since `before`: "new", "split", "evicted" or nothing."""
    old = {row[0]: row for row in before if row[5] != "evicted"}
    nodes = [node for node in llm.assembly.parts.tree_cache.nodes() if node.node_id != 0]
    rows = {
        node.node_id: [
            node.node_id,
            node.parent_id,
            shortened(shown(llm, token_ids(node.key))),
            len(node.key),
            node.lock_ref,
            "" if node.node_id in old else "new",
        ]
        for node in nodes
    }
    for row in rows.values():  # an upper half has a child that was there before
        if row[1] in rows and row[5] == "" and rows[row[1]][5] == "new":
            rows[row[1]][5] = "split"
    gone = [[*row[:4], 0, "evicted"] for key, row in old.items() if key not in rows]
    return in_outline([*rows.values(), *gone])


def token_ids(key: Sequence[Any]) -> list[int]:
    """The tokens of an edge; the first one of each pair."""
    return [entry[0] if isinstance(entry, tuple) else entry for entry in key]


def in_outline(rows: Sequence[list[Any]]) -> list[list[Any]]:
    """A child below its parent, siblings by their ids."""
    ids = {row[0] for row in rows}
    children: dict[int, list[list[Any]]] = {}
    for row in sorted(rows, key=lambda row: row[0]):
        children.setdefault(row[1] if row[1] in ids else 0, []).append(row)
    ordered: list[list[Any]] = []
    stack = list(reversed(children.get(0, [])))
    while stack:
        row = stack.pop()
        ordered.append(row)
        stack += reversed(children.get(row[0], []))
    return ordered


def table_changes(before: dict[str, list[int]], after: dict[str, list[int]]) -> dict[str, list[int] | None]:
    """How many pages stay, and the pages behind them, for each request whose page table has changed. None: it
    has no memory any more."""
    changed: dict[str, list[int] | None] = {rid: None for rid in before if rid not in after}
    for rid, pages in after.items():
        old = before.get(rid, [])
        kept = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(old, pages))))
        if kept < max(len(old), len(pages)):
            changed[rid] = [kept, *pages[kept:]]
    return changed
