# --8<-- [start:toy-tree]
from itertools import takewhile


class Node:
    def __init__(self, tokens=(), slots=()):
        self.tokens, self.slots = list(tokens), list(slots)  # of the edge that leads here
        self.children = {}  # first token of the child's edge -> child


class RadixTree:
    """Page size 1, no locks, no eviction."""

    def __init__(self):
        self.root = Node()
        # --8<-- [end:toy-tree]

    # --8<-- [start:toy-match]
    def match(self, tokens):
        """(slots of the longest cached prefix, its last node)"""
        node, slots, start = self.root, [], 0
        while start < len(tokens) and tokens[start] in node.children:
            child = node.children[tokens[start]]
            pairs = zip(child.tokens, tokens[start:])
            count = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            if count < len(child.tokens):
                child = self.split(node, child, count)
            node, slots, start = child, slots + child.slots, start + count
        return slots, node

    def split(self, parent, lower, count):
        upper = Node(lower.tokens[:count], lower.slots[:count])
        lower.tokens, lower.slots = lower.tokens[count:], lower.slots[count:]
        upper.children[lower.tokens[0]] = lower
        parent.children[upper.tokens[0]] = upper
        return upper
        # --8<-- [end:toy-match]

    # --8<-- [start:toy-insert]
    def insert(self, tokens, slots):
        """Returns the number of tokens that were cached before."""
        known, node = self.match(tokens)
        if len(known) < len(tokens):
            node.children[tokens[len(known)]] = Node(tokens[len(known) :], slots[len(known) :])
        return len(known)
        # --8<-- [end:toy-insert]
