"""A Definition of experts with smaller ones. Its reference holds the sizes as numbers: with others in their
place, it is judged in seconds, where the inputs of the real sizes take gigabytes."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import replace

from diptych.shared.tools.conformance.formats.trace_files import Definition

HIDDEN, SIZE = 384, 256
"""Three and two blocks of 128 numbers: a swap of the two is found."""


class _OtherNumbers(ast.NodeTransformer):
    def __init__(self, numbers: Mapping[int, int]) -> None:
        self.numbers = numbers

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        value = node.value
        return ast.Constant(self.numbers.get(value, value)) if type(value) is int else node


def smaller(definition: Definition) -> Definition | None:
    """The Definition with another hidden_size and intermediate_size, also in its reference. None: there is no
    such size, it is small already, or a number of the reference may be of another axis."""
    const = definition.const
    hidden, size = const.get("hidden_size", 0), const.get("intermediate_size", 0)
    if definition.op_type != "moe" or hidden <= HIDDEN or size <= SIZE:
        return None
    numbers = {hidden: {size: SIZE, 2 * size: 2 * SIZE}.get(hidden, HIDDEN), size: SIZE, 2 * size: 2 * SIZE}
    axes = dict(definition.axes)
    for name, value in const.items():
        if name.endswith("_blocks"):  # of a size: blocks stay as long as they are
            of = hidden if "hidden" in name else size * (2 if "gemm1" in name else 1)
            axes[name] = numbers[of] * value // of
            if numbers[of] * value % of:
                return None
        elif name in ("hidden_size", "intermediate_size", "gemm1_out_size"):
            if value not in numbers:
                return None
            axes[name] = numbers[value]
        elif value in numbers:
            return None
    tree = _OtherNumbers(numbers).visit(ast.parse(definition.reference))
    return replace(definition, axes=axes, reference=ast.unparse(ast.fix_missing_locations(tree)))


def changed_sizes(definition: Definition, small: Definition) -> str:
    """The two sizes in words."""
    names = ("hidden_size", "intermediate_size")
    return " and ".join(f"{name} {small.const[name]} instead of {definition.const[name]}" for name in names)
