"""Which replica takes a prompt: the one that probably has its prefix in the cache, or the least loaded one.

No server is asked what it has cached. A tree of prompt text remembers which replica has computed which
prefix, and forgets what was not used for the longest time. When the loads differ too much, the least loaded
replica takes the request. Source of the rule: the gateway of SGLang (cache_aware policy).
"""

from __future__ import annotations

import heapq
import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from diptych.shared.server.http.access import Keys
from diptych.shared.server.http.limits import MAX_BODY_BYTES, MAX_IMAGE_BYTES


@dataclass(frozen=True)
class RouterSettings:
    """When the tree decides, and when the load does."""

    cache_threshold: float = 0.3  # matched fraction of a prompt from which its replica is chosen
    balance_abs: int = 32  # loads are unbalanced when they differ by more requests than this ...
    balance_rel: float = 1.5  # ... and the largest is more than so many times the smallest
    max_tree_chars: int = 2**24  # for each replica
    health_interval: float = 5.0  # seconds
    keys: Keys = field(default_factory=Keys)
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()  # pages that may read answers; "*": any
    prefill_urls: tuple[str, ...] = ()  # servers that compute the prompts of the others
    cluster_secret: bytes = b""  # by which these know that the router has chosen
    max_body_bytes: int = MAX_BODY_BYTES + MAX_IMAGE_BYTES  # its servers have their own limits


@dataclass(eq=False)
class Replica:
    """One server. `load`: requests in flight; of a prefill server those without a first byte."""

    url: str
    is_healthy: bool = True  # it answers
    is_ready: bool = True  # it takes new requests; when it drains or is paused, it does not
    load: int = 0
    num_sent: int = 0
    prefill_address: str | None = None  # of a prefill server, for decode servers; None: not known yet


# ---- the tree ----


@dataclass(eq=False)
class Node:
    """`text` follows the text of the parents. `used`: replica -> time of its last request through here."""

    text: str
    parent: Node | None
    children: dict[str, Node] = field(default_factory=dict)  # by their first character
    used: dict[Replica, int] = field(default_factory=dict)


class PrefixTree:
    """Which replica has computed which prefix. Both operations cost one walk along the prompt."""

    def __init__(self) -> None:
        self.root = Node("", None)
        self.num_chars: dict[Replica, int] = {}
        self._clock = itertools.count()

    def match(self, prompt: str, replicas: Iterable[Replica]) -> tuple[int, set[Replica]]:
        """The longest prefix, in characters, that some of the replicas have computed, and which have."""
        node, num_matched, found = self.root, 0, set(replicas)
        while num_matched < len(prompt):
            child = node.children.get(prompt[num_matched])
            holders = found & child.used.keys() if child is not None else set()
            if child is None or not holders:
                break
            num_common = _num_common(child.text, prompt[num_matched : num_matched + len(child.text)])
            node, num_matched, found = child, num_matched + num_common, holders
            if num_common < len(child.text):
                break
        return num_matched, found if num_matched else set()

    def insert(self, prompt: str, replica: Replica) -> None:
        """The replica computes this prompt."""
        node, start, now = self.root, 0, next(self._clock)
        while start < len(prompt):
            child = node.children.get(prompt[start])
            if child is None:
                child = node.children[prompt[start]] = Node(prompt[start:], node)
            num_common = _num_common(child.text, prompt[start : start + len(child.text)])
            if num_common < len(child.text):
                child = self._split(child, num_common)
            if replica not in child.used:
                self.num_chars[replica] = self.num_chars.get(replica, 0) + len(child.text)
            child.used[replica] = now
            node, start = child, start + len(child.text)

    def _split(self, node: Node, num_first: int) -> Node:
        """Two nodes of one; returns the upper one."""
        assert node.parent is not None
        upper = Node(node.text[:num_first], node.parent, {node.text[num_first]: node}, dict(node.used))
        node.parent.children[node.text[0]] = upper
        node.text, node.parent = node.text[num_first:], upper
        return upper

    def evict(self, max_chars: int) -> None:
        """Forget what each replica has not used for the longest time, until it has at most `max_chars`."""
        for replica in [each for each, num_chars in self.num_chars.items() if num_chars > max_chars]:
            nodes = [node for node in self._nodes() if replica in node.used]
            heap = [(node.used[replica], id(node), node) for node in nodes if _is_leaf(node, replica)]
            heapq.heapify(heap)
            while self.num_chars[replica] > max_chars:
                _, _, node = heapq.heappop(heap)
                parent = node.parent
                self._forget(node, replica)
                if parent is not None and replica in parent.used and _is_leaf(parent, replica):
                    heapq.heappush(heap, (parent.used[replica], id(parent), parent))

    def remove(self, replica: Replica) -> None:
        """The replica has started anew: its cache is empty."""
        for node in [*self._nodes()]:
            if replica in node.used:
                self._forget(node, replica)

    def _forget(self, node: Node, replica: Replica) -> None:
        del node.used[replica]
        self.num_chars[replica] -= len(node.text)
        while node.parent is not None and not node.used and not node.children:
            del node.parent.children[node.text[0]]
            node = node.parent

    def _nodes(self) -> Iterable[Node]:
        stack = [*self.root.children.values()]
        while stack:
            node = stack.pop()
            stack += node.children.values()
            yield node


def _is_leaf(node: Node, replica: Replica) -> bool:
    return not any(replica in child.used for child in node.children.values())


def _num_common(a: str, b: str) -> int:
    """Length of the common prefix, by bisection: comparing slices is much faster than characters."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


# ---- the choice ----


class CacheAwarePolicy:
    """Longest known prefix first; the least load where no prefix is known or loads are unbalanced."""

    def __init__(self, settings: RouterSettings) -> None:
        self.settings = settings
        self.tree = PrefixTree()

    # --8<-- [start:choose-a-replica]
    def choose(self, prompt: str, replicas: Sequence[Replica]) -> Replica:
        """One of the healthy replicas. Remembers that it computes this prompt."""
        settings, loads = self.settings, [replica.load for replica in replicas]
        is_unbalanced = max(loads) - min(loads) > settings.balance_abs and max(
            loads
        ) > settings.balance_rel * min(loads)
        num_matched, holders = self.tree.match(prompt, replicas)
        if is_unbalanced or num_matched <= settings.cache_threshold * len(prompt):
            chosen = least_loaded(replicas)
        else:
            chosen = least_loaded([replica for replica in replicas if replica in holders])
        self.tree.insert(prompt, chosen)
        self.tree.evict(2 * settings.max_tree_chars)  # the interval's eviction is the regular one
        return chosen

    # --8<-- [end:choose-a-replica]


def least_loaded(replicas: Sequence[Replica]) -> Replica:
    """Return the replica with the least load. Ties go to the one that was sent fewer requests: else the first
    would get them all."""
    return min(replicas, key=lambda replica: (replica.load, replica.num_sent))


def prompt_text(content: bytes) -> str:
    """The text that the cache of a server is about, of a body of any API: earlier parts of a prompt come
    first. Empty where there is none; whether the body is valid, the replica decides."""
    try:
        body = json.loads(content)
        if not isinstance(body, dict):
            return ""
        parts = [body.get(name) for name in ("cache_salt", "system", "instructions", "messages")]
        parts += [body.get(name) for name in ("prompt", "input", "text", "input_ids")]
        texts = [part if isinstance(part, str) else json.dumps(part) for part in parts if part is not None]
    except (ValueError, RecursionError):
        return ""
    return "\n".join(texts)
