"""Clauses of expert dispatch. The ranks are threads, their experts those of the reference."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from diptych.shared import registry
from diptych.shared.config import MoEConfig
from diptych.shared.interfaces import Collectives, ExpertDispatch, FusedExperts, TopKOutput
from diptych.shared.parallel.expert_map import ExpertPlacement, map_of
from diptych.shared.tools.conformance.clauses.case import Case, grid
from diptych.shared.tools.conformance.clauses.clause import contract
from diptych.shared.tools.conformance.clauses.compare import expect_close, expect_equal, expect_form
from diptych.shared.tools.conformance.clauses.device import check_device
from diptych.shared.tools.conformance.clauses.tolerance import tolerance
from diptych.shared.tools.conformance.oracles.rank_threads import on_ranks

LIMIT = 10.0  # time limit of a group in seconds
NUM_LOCAL, HIDDEN, INTERMEDIATE, TOPK = 3, 8, 8, 2


class Tokens(Case):
    """`ranks`: in `ep` parts. `counts`: tokens of each rank. `padding`: some ids are -1. `has_nan`: tokens
    of such ids alone are NaN."""

    dtype = torch.float32
    padding = False
    has_nan = False

    @property
    def num_physical(self) -> int:
        return NUM_LOCAL * self.ep

    def all_experts(self) -> FusedExperts:
        """The experts of all parts, as on a single rank."""
        generator = torch.Generator().manual_seed(self.ep)
        experts = fused_experts(self.num_physical, INTERMEDIATE, self.dtype)
        for weight in (experts.w13, experts.w2):
            weight.data = torch.randn(weight.shape, generator=generator).to(self.dtype)
        return experts

    def tokens(self, rank: int) -> tuple[torch.Tensor, TopKOutput]:
        generator = torch.Generator().manual_seed(100 + rank)
        num_tokens = self.counts[rank]
        x = torch.randn(num_tokens, HIDDEN, generator=generator).to(self.dtype)
        weights = torch.rand(num_tokens, TOPK, generator=generator)
        ids = torch.rand(num_tokens, self.num_physical, generator=generator).argsort(-1)[:, :TOPK]
        if self.padding:
            ids[::2, 0] = -1
            ids[::3] = -1
            x[::3] = torch.nan if self.has_nan else x[::3]
        return x, TopKOutput(weights, ids.to(torch.int32))

    def local_experts(self, rank: int) -> FusedExperts:
        """A rank's experts: those of its part, each with a slice of its intermediate size."""
        size = self.ranks // self.ep
        part, piece = divmod(rank, size)
        whole, num_rows = self.all_experts(), INTERMEDIATE // size
        own = slice(part * NUM_LOCAL, (part + 1) * NUM_LOCAL)
        rows = slice(piece * num_rows, (piece + 1) * num_rows)
        experts = fused_experts(NUM_LOCAL, num_rows, self.dtype)
        gate, up = whole.w13[own].chunk(2, dim=1)
        experts.w13.data = torch.cat([gate[:, rows], up[:, rows]], dim=1)
        experts.w2.data = whole.w2[own][:, :, rows].contiguous()
        return experts

    def run(self, impl: type[ExpertDispatch]) -> list[torch.Tensor]:
        def run_rank(group: Collectives) -> torch.Tensor:
            x, topk = self.tokens(group.rank)
            return impl(group, self.ep).run(x, topk, self.local_experts(group.rank))

        return on_ranks(self.ranks, run_rank, LIMIT)


def fused_experts(num_experts: int, intermediate_size: int, dtype: torch.dtype) -> FusedExperts:
    config = MoEConfig(num_experts, 1, intermediate_size, norm_topk_prob=False)
    experts: FusedExperts = registry.load("moe", "reference")(config, HIDDEN).experts.to(dtype)
    return experts


def expect_outputs(case: Tokens, found: list[torch.Tensor]) -> None:
    whole = case.all_experts()
    for rank, y in enumerate(found):
        x, topk = case.tokens(rank)
        expect_form(f"y of rank {rank}", y, x)
        expect_close(f"y of rank {rank}", y, whole(x, topk), tolerance("moe", case.dtype))


SIZES = [(2, 2), (3, 3), (2, 1), (4, 2)]
MIXES = {"as many": (3, 3, 3, 3), "uneven": (5, 1, 0, 2), "one token": (0, 1, 0, 0), "none": (0, 0, 0, 0)}
EVERY = tuple(
    Tokens(f"{ranks} ranks, ep {ep}, {mix}", ranks=ranks, ep=ep, counts=counts)
    for ranks, ep in SIZES
    for mix, counts in MIXES.items()
)


@contract("A token gets what one rank with all experts would compute, whatever ranks it is on.", EVERY)
def outputs_of_all_experts(impl: type[ExpertDispatch], case: Tokens) -> None:
    expect_outputs(case, case.run(impl))


@contract(
    "An id of -1 contributes nothing; a token of such ids alone gets zeros.",
    grid("ep {ep}", of=Tokens, ranks=2, ep=(1, 2), counts=((5, 4),), padding=True),
)
def padding_ids(impl: type[ExpertDispatch], case: Tokens) -> None:
    found = case.run(impl)
    expect_outputs(case, found)
    expect_equal("a token without experts", found[0][3], torch.zeros(HIDDEN))


@contract(
    "Padding tokens, of ids of -1 alone, may be NaN: they get zeros, and no other token changes.",
    grid("ep {ep}", of=Tokens, ranks=2, ep=(1, 2), counts=((5, 4),), padding=True, has_nan=True),
)
def padding_tokens(impl: type[ExpertDispatch], case: Tokens) -> None:
    found = case.run(impl)
    expect_outputs(case, found)
    expect_equal("a padding token", found[1][3], torch.zeros(HIDDEN))


@contract(
    "Half types: sums are made in float32 and rounded to the dtype of x.",
    grid("{dtype}", of=Tokens, ranks=2, ep=2, counts=((40, 30),), dtype=(torch.bfloat16, torch.float16)),
)
def half_types(impl: type[ExpertDispatch], case: Tokens) -> None:
    expect_outputs(case, case.run(impl))


@contract("All tokens may have one expert, and a rank none.", grid("part {part}", of=Tokens, part=(0, 1)))
def all_to_one_part(impl: type[ExpertDispatch], case: Tokens) -> None:
    case = case.replace(ranks=2, ep=2, counts=(4, 2))
    expert = case.part * NUM_LOCAL + 1

    def run_rank(group: Collectives) -> torch.Tensor:
        x, topk = case.tokens(group.rank)
        one = TopKOutput(topk.topk_weights[:, :1], torch.full((len(x), 1), expert, dtype=torch.int32))
        return impl(group, case.ep).run(x, one, case.local_experts(group.rank))

    whole = case.all_experts()
    for rank, y in enumerate(on_ranks(case.ranks, run_rank, LIMIT)):
        x, topk = case.tokens(rank)
        ids = torch.full((len(x), 1), expert, dtype=torch.int32)
        expected = whole(x, TopKOutput(topk.topk_weights[:, :1], ids))
        expect_close(f"y of rank {rank}", y, expected, tolerance("moe", torch.float32))


class Replicated(Tokens):
    """`num_tokens` that all ranks have. `redundant` experts have a second replica."""

    num_tokens = 5
    redundant = 0

    def placement(self) -> ExpertPlacement:
        """Physical experts in a shuffled order."""
        num_logical = self.num_physical - self.redundant
        generator = torch.Generator().manual_seed(self.redundant)
        order = torch.randperm(self.num_physical, generator=generator) % num_logical
        return ExpertPlacement(map_of(order[None], num_logical), 0, check_device())

    def run_replicated(self, impl: type[ExpertDispatch]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The summand of each rank, and the load that it has counted."""
        x, topk = self.logical_tokens()

        def run_rank(group: Collectives) -> tuple[torch.Tensor, torch.Tensor]:
            dispatch, placement = impl(group, self.ep), self.placement()
            experts = self.local_experts(group.rank).to(check_device())
            return dispatch.run_replicated(x, topk, experts, placement), placement.load

        collectives = through_cpu(registry.load("collectives", "reference"))
        return on_ranks(self.ranks, run_rank, LIMIT, collectives, in_turn=True)

    def logical_tokens(self) -> tuple[torch.Tensor, TopKOutput]:
        x, topk = self.replace(counts=(self.num_tokens,)).tokens(0)
        ids = torch.where(topk.topk_ids < self.num_physical - self.redundant, topk.topk_ids, -1)
        return x.to(check_device()), TopKOutput(topk.topk_weights.to(check_device()), ids.to(check_device()))

    def expected(self) -> torch.Tensor:
        """Compute the result on one rank that has all physical experts."""
        x, topk = self.logical_tokens()
        ids = self.placement().choose(topk.topk_ids)
        return self.all_experts().to(check_device())(x, topk._replace(topk_ids=ids))


def through_cpu(impl: type[Collectives]) -> type[Collectives]:
    """Collectives over gloo for tensors on a GPU too."""

    class ThroughCpu(impl):  # type: ignore[misc, valid-type]
        def _gather(self, op: str, x: torch.Tensor) -> list[torch.Tensor]:
            return [part.to(x.device) for part in super()._gather(op, x.cpu())]

        def all_to_all(self, x: torch.Tensor, *counts: Sequence[int]) -> torch.Tensor:
            return super().all_to_all(x.cpu(), *counts).to(x.device)

    return ThroughCpu


@contract(
    "Tokens that all ranks have: the sum over ranks is what one rank with all experts would compute, of the "
    "replicas that `placement.choose` names. It counts each token and choice once.",
    grid(
        "{ranks} ranks, ep {ep}, {num_tokens} tokens, {redundant} redundant",
        of=Replicated, ranks=4, ep=(2, 4), num_tokens=(1, 5), redundant=(0, 2), padding=True,
    ),
)  # fmt: skip
def tokens_of_all_ranks(impl: type[ExpertDispatch], case: Replicated) -> None:
    x, topk = case.logical_tokens()
    found = case.run_replicated(impl)
    for y, _ in found:
        expect_form("a summand", y, x)
    total = torch.stack([y for y, _ in found]).sum(0)
    expect_close("the sum of ranks", total, case.expected(), tolerance("moe", torch.float32))
    ids = topk.topk_ids[topk.topk_ids >= 0].long()
    for _, load in found:
        expect_equal("load", load, ids.bincount(minlength=len(load)))


@contract("No argument is modified.", EVERY[1:2])
def arguments_are_kept(impl: type[ExpertDispatch], case: Tokens) -> None:
    def run_rank(group: Collectives) -> tuple[torch.Tensor, TopKOutput]:
        x, topk = case.tokens(group.rank)
        impl(group, case.ep).run(x, topk, case.local_experts(group.rank))
        return x, topk

    for rank, (x, topk) in enumerate(on_ranks(case.ranks, run_rank, LIMIT)):
        expected_x, expected = case.tokens(rank)
        expect_equal("x", x, expected_x)
        expect_equal("topk_weights", topk.topk_weights, expected.topk_weights)
        expect_equal("topk_ids", topk.topk_ids, expected.topk_ids)
