"""Problems (one operation with inputs), operations, and calling conventions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from diptych.shared.tools.conformance.clauses.inputs import Inputs
from diptych.shared.tools.conformance.clauses.poison import amid_poison, poisoned
from diptych.shared.tools.conformance.clauses.tolerance import Tolerance, tolerance

LARGEST_DRAWN = 2**26
"""Elements of inputs that are drawn a second time."""
Tensors = Mapping[str, torch.Tensor]
Suspect = Callable[["Problem"], dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Problem:
    """One operation with its inputs.

    `tensors`: the inputs under the names of the operation, on the device under check; memory that must not be
    read holds NaN. `truth`: problem -> the results in float64 on the CPU. `kind`: the row of the tolerance
    table, if there is no `limit`, which computes the tolerance from expected results; `limits_each`: of each
    result by itself. `size`: the x value in
    plots. `num_bytes`, `flops`: for the roofline bound. `ours`: the same operation by an implementation of
    this project. `dtypes`: of results that have another than `dtype`."""

    name: str
    tensors: Tensors
    constants: Mapping[str, Any]
    truth: Suspect = field(compare=False)
    kind: str
    dtype: torch.dtype
    size: int
    num_bytes: float
    flops: float
    ours: Callable[[], object] | None = field(default=None, compare=False)
    limit: Callable[[Tensors], Tolerance] | None = None
    limits_each: bool = False
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)

    @cached_property
    def expected(self) -> dict[str, torch.Tensor]:
        """The results in float64 on the CPU, computed at the first use: after the calls under check."""
        return self.truth(self)

    @cached_property
    def distinct(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Result -> the places of elements whose values differ and are not tiny, and the values in order."""
        found = {}
        for name, truth in self.expected.items():
            exact = truth.flatten()
            usable = (torch.isfinite(exact) & (exact.abs() > 2.0**-14)).nonzero()[:, 0]
            values, order = exact[usable].sort()
            is_first = torch.ones_like(values, dtype=torch.bool)
            is_first[1:] = values[1:] != values[:-1]
            found[name] = usable[order][is_first], values[is_first]
        return found

    @property
    def tolerance(self) -> Tolerance:
        return self.limit(self.expected) if self.limit else tolerance(self.kind, self.dtype)

    def tolerance_of(self, name: str) -> Tolerance:
        """The tolerance of one result."""
        if self.limit is None or not self.limits_each:
            return self.tolerance
        return self.limit({name: self.expected[name]})

    @property
    def num_elements(self) -> int:
        return sum(each.numel() for each in self.tensors.values())

    @property
    def device(self) -> torch.device:
        return next(iter(self.tensors.values())).device

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    def with_tensors(self, **tensors: torch.Tensor) -> Problem:
        return replace(self, tensors={**self.tensors, **tensors})

    def with_constants(self, **constants: Any) -> Problem:
        return replace(self, constants={**self.constants, **constants})

    def strided(self, names: tuple[str, ...]) -> Problem:
        """The problem with these tensors as slices of wider rows, as after a fused projection, with NaN
        beside them. Tensors that a convention splits from an input stay slices of it."""
        wider = {name: beside_poison(self[name]) for name in names if name in self.tensors}
        return self._in_another_form(**wider).with_constants(is_strided=True)

    def with_other_pages(self, names: tuple[str, ...]) -> Problem:
        """The problem with the same KV on other pages; pages that are not live hold NaN in both."""
        num_pages = self[names[0]].shape[0]
        target = torch.arange(num_pages, device=self["page_table"].device).flip(0).roll(3)
        moved = {}
        for name in names:
            moved[name] = poisoned(self[name].shape, self[name].dtype, self[name].device)
            moved[name][target] = self[name]
        return self._in_another_form(page_table=target[self["page_table"].long()].to(torch.int32), **moved)

    def _in_another_form(self, **tensors: torch.Tensor) -> Problem:
        """The same inputs in other memory: the expected results are computed once."""
        return replace(self.with_tensors(**tensors), truth=lambda _: self.expected)

    def with_finite_memory(self) -> Problem:
        """The problem with random numbers in place of NaN, so that wrong results can be compared."""
        inputs = Inputs(97)
        finite = {
            name: torch.where(
                torch.isnan(tensor), inputs.normal(*tensor.shape).to(tensor.device, tensor.dtype), tensor
            )
            if tensor.numel() < LARGEST_DRAWN
            else tensor.nan_to_num(nan=0.37)
            for name, tensor in self.tensors.items()
            if tensor.is_floating_point() and tensor.dtype.itemsize > 1
        }
        return self.with_tensors(**finite)

    def dtype_of(self, name: str) -> torch.dtype:
        """The type of a result."""
        return self.dtypes.get(name, self.dtype)

    def row(self, i: int, names: tuple[str, ...]) -> Problem:
        """The problem with row i of the batch alone; of draws, with group i."""
        if "num_groups" in self.constants:
            step = self.constants["num_groups"]
            alone = self.with_tensors(**{name: self[name][i::step].clone() for name in names})
            return alone.with_constants(num_groups=1)
        alone = self.with_tensors(**{name: self[name][i : i + 1].clone() for name in names})
        return replace(alone, truth=lambda _: {name: y[i : i + 1] for name, y in self.expected.items()})


@dataclass(frozen=True)
class Like:
    """An operation of `--like`.

    `cases` have awkward sizes; `timed` returns the timed cases for a kind of device. `make(case,
    takes_scale, seed)` draws the inputs; for a convention without a scale, q is scaled. `sparse`: the tensor
    of which `other_contents` sets elements to 0. `negated`: a tensor whose signs it changes instead, if there
    are too many inputs for a second draw. `paged`: tensors
    [num_pages, ...]; `rows`: tensors with one row for each member of the batch. `more_cases`: feature ->
    cases that are checked on request. `suspects`: name of a known mistake -> its results. `ranks`: the number
    of processes; 0: a plain function. `beside`: the function whose time is compared."""

    name: str
    what: str
    size_name: str
    cases: tuple[Any, ...]
    timed: Callable[[str], tuple[Any, ...]]
    make: Callable[..., Problem]
    suspects: Mapping[str, Suspect]
    sparse: str = ""
    negated: str = ""
    paged: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    more_cases: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    ranks: int = 0
    beside: str = "Diptych"


@dataclass
class Call:
    """One call. `written`: the arguments that the function may modify. `results`: return value -> the results
    under the names of the operation."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    written: tuple[torch.Tensor, ...] = ()
    results: Callable[[Any], dict[str, torch.Tensor]] = lambda returned: {"out": returned}


@dataclass(frozen=True)
class Convention:
    """A calling convention. `signature`: how the function is called. `shapes`: of its arguments. `strided`:
    inputs whose rows may be slices of wider rows; their last dimension is always dense. Names that the
    operation does not have are of tensors that `build` splits from an input."""

    library: str
    signature: str
    shapes: str
    build: Callable[[Problem], Call]
    strided: tuple[str, ...] = ()
    takes_scale: bool = True


class Variant(NamedTuple):
    """A problem in another form. `what`: the form in a message; `label`: the same in short; `mistake`: of a
    function that fails in this form only. `is_same`: the call has the memory of the call before. `contents`:
    a name of the inputs and expected results, if they are not those of the problem itself."""

    label: str
    what: str
    problem: Problem
    mistake: str = ""
    is_same: bool = False
    contents: str = ""


SAME = "other contents in the same memory"


def variants_of(
    like: Like, convention: Convention, problem: Problem, other: Problem | None = None
) -> list[Variant]:
    """The forms in which a function is run: the problem itself comes first. `other`: the same sizes with
    other contents."""
    variants = [Variant("values", "values", problem)]
    if other is not None:
        mistake = "a result is kept for an address: other contents in the same memory give a wrong result"
        variants.append(Variant(SAME, SAME, other, mistake, is_same=True, contents="other"))
    if like.paged:
        mistake = "the result depends on which pages hold the KV"
        moved = problem.with_other_pages(like.paged)
        variants.append(Variant("other pages", "on other pages", moved, mistake))
    if convention.strided:
        what = f"{', '.join(convention.strided)} as slices of wider rows"
        mistake = "strides are ignored: rows that are slices of wider ones give other results"
        variants.append(Variant("strided rows", what, problem.strided(convention.strided), mistake))
    for rank in (0, like.ranks - 1) if like.ranks else ():
        late = f"rank {rank} is late"
        variants.append(Variant(late, f"when {late}", problem.with_constants(late=rank)))
    return variants


def other_contents(like: Like, case: Any, takes_scale: bool, seed: int) -> Problem:
    """The problem of another seed, with zeros in the first column, and in the last row except one element."""
    problem = like.make(case, takes_scale, seed)
    if not like.sparse:
        return problem
    x = problem[like.sparse].clone()
    rows = x.flatten(1) if x.is_contiguous() else x.view(len(x), -1)
    if problem.kind != "draws" and rows.shape[1] > 1:
        column = 1 + seed % (rows.shape[1] - 1)
        kept = rows[-1, column].clone()
        rows[-1] = 0
        rows[-1, column] = torch.where(kept == 0, torch.ones_like(kept), kept)
    if rows.shape[1] > 1:
        rows[:, 0] = 0
    return problem.with_tensors(**{like.sparse: x})


def negated(problem: Problem, name: str) -> Problem:
    """The problem with the other sign of all elements of a tensor, which may be of FP8."""
    x = problem[name]
    changed = (x.view(torch.uint8) ^ 0x80).view(x.dtype) if x.dtype.itemsize == 1 else -x
    return problem.with_tensors(**{name: changed})


def beside_poison(tensor: torch.Tensor) -> torch.Tensor:
    """The same values as slices of wider rows of NaN; the elements of a row stay dense. The margin keeps the
    alignment of 16 bytes that vector loads need."""
    flat = amid_poison(tensor.flatten(1), margin=16)
    return flat.view(tensor.shape)


def bytes_of(*tensors: torch.Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
