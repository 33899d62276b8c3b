"""Planted bugs in the optimized panel's draft trees: words of its kernels' source, changed."""

from __future__ import annotations

import importlib.util
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from diptych.shared.interfaces import DraftTreeOps
from tests.conformance.mutants.mutant import mutant_of

OPTIMIZED = Path(__file__).parents[3] / "optimized"
_FOLDER = tempfile.TemporaryDirectory(prefix="draft_tree_mutants_")


@cache
def changed(kernel: str, before: str, after: str, name: str) -> Any:
    """The optimized DraftTreeOps with a kernel's file in which `before`, which is there once, became `after`.
    Kernels are compiled from source, so there has to be a file. (No mutant may write out of bounds.)"""
    source = (OPTIMIZED / "kernels" / "draft" / f"{kernel}.py").read_text("utf-8")
    assert source.count(before) == 1, f"{source.count(before)} times: {before!r}"
    mutated = _load(f"{name}_{kernel}", source.replace(before, after))
    module = _load(f"{name}_ops", (OPTIMIZED / "speculative" / "draft_tree.py").read_text("utf-8"))
    for function, value in vars(mutated).items():
        if function in vars(module) and callable(value):
            setattr(module, function, value)
    return module.DraftTreeOps


def _load(name: str, source: str) -> Any:
    path = Path(_FOLDER.name) / f"{name}.py"
    path.write_text(source, "utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Variant(DraftTreeOps):
    """Made when it is first asked for."""

    kernel: str
    before: str
    after: str

    def __new__(cls) -> Any:
        return changed(cls.kernel, cls.before, cls.after, cls.__name__)()


# Top tokens


@mutant_of("draft_tree")
class SlicesAreNotRescaled(Variant):
    """Sums of slices are added up though each is relative to its own maximum."""

    kernel, before, after = "top_tokens", "sums * tl.exp(maxima - largest))", "sums)"


@mutant_of("draft_tree")
class TopTokensTakeTheLastOfTies(Variant):
    """Of equal logits the highest id comes first."""

    kernel = "top_tokens"
    before = "tl.min(tl.where(is_left & (values == best), ids, NOBODY), axis=0)"
    after = "tl.max(tl.where(is_left & (values == best), ids, -1), axis=0)"


@mutant_of("draft_tree")
class RowsOfNothingCount(Variant):
    """Where no token is possible, the probabilities are NaN."""

    kernel, before, after = "top_tokens", "is_good = total >= 1.0", "is_good = total == total"


@mutant_of("draft_tree")
class TopTokensOfDenseRows(Variant):
    """Rows are taken to lie one behind the other."""

    kernel, before, after = "top_tokens", "row * row_stride + ids", "row * vocab_size + ids"


# Beams


@mutant_of("draft_tree")
class ScoreOfTheColumnsBeam(Variant):
    """Candidate a * K + c gets the score of beam c."""

    kernel, before, after = "draft_beams", "request * K + candidates // K", "request * K + candidates % K"


@mutant_of("draft_tree")
class ParentOfTheColumn(Variant):
    """Candidate a * K + c goes on from beam c."""

    kernel, before, after = "draft_beams", "(index // K)", "(index % K)"


@mutant_of("draft_tree")
class OneOfEachBeam(Variant):
    """Every beam has one successor."""

    kernel, before = "draft_beams", "is_left &= candidates != index"
    after = "is_left &= candidates // K != index // K"


@mutant_of("draft_tree")
class TiesGoToTheLast(Variant):
    """Of equally good candidates the last goes on."""

    kernel = "draft_beams"
    before = "tl.min(tl.where(is_left & (scores == best), candidates, BLOCK), axis=0)"
    after = "tl.max(tl.where(is_left & (scores == best), candidates, -1), axis=0)"


# Choosing nodes


@mutant_of("draft_tree")
class BoundIsTheBest(Variant):
    """The bound is one that a single candidate reaches."""

    kernel, before, after = "draft_select", "num_reaching >= NUM_CHOSEN", "num_reaching >= 1"


@mutant_of("draft_tree")
class OneTieTooFew(Variant):
    """Of candidates that tie with the last, one too few is chosen."""

    kernel, before, after = "draft_select", "(rank <= NUM_CHOSEN)", "(rank < NUM_CHOSEN)"


@mutant_of("draft_tree")
class LastTiesAreChosen(Variant):
    """Of candidates that tie with the last, the last are nodes: children without their parents."""

    kernel, before, after = "draft_select", "tl.cumsum(ties, axis=0)", "tl.cumsum(ties, axis=0, reverse=True)"


@mutant_of("draft_tree")
class FirstStepDoesNotCount(Variant):
    """Candidates of later steps are numbered as if there had been no first one."""

    kernel, before, after = "draft_select", "K + (step - 2) * K * K", "(step - 2) * K * K"


@mutant_of("draft_tree")
class BeamsByColumn(Variant):
    """A candidate's beam is taken to be its place after it."""

    kernel, before, after = "draft_select", "% (K * K) // K", "% (K * K) % K"


# Links


@mutant_of("draft_tree")
class DepthsStopBelowTheRoot(Variant):
    """The last edge does not count."""

    kernel, before, after = "draft_link", "(ancestors >= 0).to(", "(ancestors > 0).to("


@mutant_of("draft_tree")
class NodesSeeThemselvesOnly(Variant):
    """Nothing that is met while climbing is remembered."""

    kernel, before, after = "draft_link", "visible |= others == ancestors", "visible &= others != ancestors"


@mutant_of("draft_tree")
class SiblingsAreTheirOwn(Variant):
    """A node is its own next sibling."""

    kernel, before, after = "draft_link", "(others > nodes[:, None])", "(others >= nodes[:, None])"


@mutant_of("draft_tree")
class PaddingHasParents(Variant):
    """Whatever stands behind the nodes is taken for parents."""

    kernel, before, after = "draft_link", "(nodes > 0) & (nodes < num_nodes)", "(nodes > 0) & (nodes < NUM)"


@mutant_of("draft_tree")
class PaddingHasTokens(Variant):
    """Whatever stands behind the nodes is taken for token ids."""

    kernel, before, after = "draft_link", "mask=nodes < num_nodes, other=0", "mask=nodes < NUM, other=0"


# Mask


@mutant_of("draft_tree")
class MaskStartsEarly(Variant):
    """A request's rows stand where those of the one before should."""

    kernel, before, after = (
        "draft_mask",
        "mask=requests < request, other=0",
        "mask=requests < request - 1, other=0",
    )


@mutant_of("draft_tree")
class MaskHidesTheRoot(Variant):
    """The tree's first column belongs to the prefix."""

    kernel, before, after = "draft_mask", "inside & (column >= 0)", "inside & (column >= 1)"


@mutant_of("draft_tree")
class MaskHidesThePrefix(Variant):
    """The text before the root is not seen."""

    kernel, before, after = "draft_mask", "other=1", "other=0"


# Accepting


@mutant_of("draft_tree")
class AnyNodesToken(Variant):
    """A node with the right token follows, whosever child it is, if only it comes later."""

    kernel, before, after = "draft_accept", "(parents == child) & (token", "(nodes > child) & (token"


@mutant_of("draft_tree")
class RootsAndPaddingAreChildren(Variant):
    """Nodes without a parent count as the root's children."""

    kernel, before, after = "draft_accept", "(parents == 0)", "(parents <= 0)"


@mutant_of("draft_tree")
class SampleOfTheRoot(Variant):
    """Every draft is compared with the root's sample."""

    kernel, before, after = (
        "draft_accept",
        "tl.where(nodes == child, targets, 0)",
        "tl.where(nodes == 0, targets, 0)",
    )


@mutant_of("draft_tree")
class DepthIsOneMore(Variant):
    """The walk goes on when max_depth is reached."""

    kernel, before, after = "draft_accept", "num_accepted < MAX_DEPTH", "num_accepted <= MAX_DEPTH"


@mutant_of("draft_tree")
class NoBonusToken(Variant):
    """The last sample is not handed on."""

    kernel, before, after = (
        "draft_accept",
        "ids, mask=columns <= MAX_DEPTH",
        "ids, mask=columns < num_accepted",
    )
