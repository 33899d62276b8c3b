"""Planted bugs in the optimized sampler: words of its kernels' source, changed."""

from __future__ import annotations

from tests.conformance.mutants.mutant import mutant_of
from tests.kernels.sampling_variants import Change, Variant

# Whole rows in registers


@mutant_of("sampler")
class SmallTopPStopsOneLate(Variant):
    """The token after a sum of exactly top_p is kept as well: <= for <."""

    changes = (Change("small", "(mass_before < enough)", "(mass_before <= enough)"),)


@mutant_of("sampler")
class SmallTopKKeepsOneMore(Variant):
    """A token with top_k tokens before it is kept."""

    changes = (Change("small", "num_before < top_ks", "num_before <= top_ks"),)


@mutant_of("sampler")
class SmallForgetsTies(Variant):
    """Only likelier tokens count as before a token, not equally likely ones with lower ids."""

    changes = (Change("small", " | ((s == own[:, None]) & (ids < token_ids[:, None]))", ""),)


@mutant_of("sampler")
class SmallTakesTheFirstBest(Variant):
    """The token with the best score is taken whether the filters keep it or not."""

    changes = (Change("small", "is_done |= is_kept | (num_before == 0)", "is_done |= num_before >= 0"),)


@mutant_of("sampler")
class SmallTopLogprobsTakeTheLastOfTies(Variant):
    """The best tokens are listed highest id first where they tie."""

    changes = (
        Change(
            "small",
            "best_ids = lowest_id(left & (s == best[:, None]), ids, 1)",
            "best_ids = tl.max(tl.where(left & (s == best[:, None]), ids, -1), axis=1)",
        ),
    )


# Adjusted logits


@mutant_of("sampler")
class AdjustingHidesNan(Variant):
    """A NaN whose token is banned is lost."""

    changes = (Change("adjust", "tl.where(raw != raw, raw, x)", "x"),)


@mutant_of("sampler")
class AdjustingReadsMasksBackwards(Variant):
    """The bits of vocab_mask are read from the other end of each word."""

    changes = (Change("adjust", "(ids % 32)[None, :]", "(31 - ids % 32)[None, :]"),)


@mutant_of("sampler")
class AdjustingForgetsThePrompt(Variant):
    """The repetition penalty looks at the output only."""

    changes = (Change("adjust", "            if PROMPT:", "            if not PROMPT:"),)


# Noise


@mutant_of("sampler")
class NoiseOfHalfASeed(Variant):
    """The high word of the seed is its low word again."""

    changes = (Change("noise", "seeds >> 32", "seeds"),)


@mutant_of("sampler")
class NoiseMixesOnceLess(Variant):
    """The last shift of the hash is missing."""

    changes = (Change("noise", "return h ^ (h >> 16)", "return h"),)


@mutant_of("sampler")
class HalfOfTheNoiseIsForgotten(Variant):
    """Tokens with v above one half never win, not even where no other token is likely."""

    changes = (Change("scan", "if time > 0.69:", "if time > 1e9:"),)


@mutant_of("sampler")
class RaceOfTheUnlikely(Variant):
    """Noise is divided by the probability's inverse."""

    changes = (Change("scan", "tl.exp2(-exponents)", "tl.exp2(exponents)"),)


# Rows that a temperature alone decides


@mutant_of("sampler")
class TheFirstPartWins(Variant):
    """Only the part with the earliest bound is computed."""

    changes = (Change("race", "last = 32.0 - ", "last = -1e30 - "),)


@mutant_of("sampler")
class BoundsOfAnotherTemperature(Variant):
    """Bounds are those of temperature 1."""

    changes = (Change("race", "rate = LOG2_E / tl.load(temperatures_ptr + row)", "rate = LOG2_E"),)


@mutant_of("sampler")
class RacePassesOverNan(Variant):
    """A row with a NaN has a token, where another logit is the largest."""

    changes = (
        Change("race", "largest = largest_or_nan(part_largest, 0)", "largest = tl.max(part_largest, axis=0)"),
    )


@mutant_of("sampler")
class RaceTakesTheLastOfTies(Variant):
    """Of parts with equal scores, the last one that is computed gives the token."""

    changes = (Change("race", "((score == best) & (best_id < token_id))", "(score == best)"),)


# Large vocabularies


@mutant_of("sampler")
class SlicesAreNotRescaled(Variant):
    """The sums of slices are added up though each is relative to its own maximum."""

    changes = (Change("pick", "slice_sum.to(tl.float64) * shares", "slice_sum.to(tl.float64)"),)


@mutant_of("sampler")
class ScoresOfSlicesAreNotComparable(Variant):
    """The best scores of slices are compared by their noise alone."""

    changes = (
        Change("pick", "is_slice, s.to(tl.float64) + gumbel64(state, ids)", "is_slice, gumbel64(state, ids)"),
    )


@mutant_of("sampler")
class OneSliceForAll(Variant):
    """Where min_p drops the proposal, every slice's best token is looked for in the first one."""

    changes = (
        Change("gather", "MAX_GROUPS = tl.constexpr(1024)", "MAX_GROUPS = tl.constexpr(0)"),
        Change("check", "piece * SIZE, SIZE", "0 * SIZE, SIZE"),
    )


@mutant_of("sampler")
class FloorAboveMinP(Variant):
    """Tokens that min_p keeps by a narrow margin are not gathered."""

    changes = (Change("pick", "tl.log(min_p) - 1e-3", "tl.log(min_p) + 1.0"),)


@mutant_of("sampler")
class BoundAboveTheKthLargest(Variant):
    """The bound is reached by half of the groups that it should be reached by."""

    changes = (Change("gather", "if num_first >= k:", "if num_first >= k // 2:"),)


@mutant_of("sampler")
class GatherLosesTheBound(Variant):
    """Tokens equal to the bound are not gathered: among them is the best one, if its score is the bound."""

    changes = (Change("gather", "(inside & (s >= bound))", "(inside & (s > bound))"),)


@mutant_of("sampler")
class GroupsOfTheFirstSlice(Variant):
    """A group is looked up within the first slice, whichever it belongs to."""

    changes = (Change("gather", "group // per_slice * (DEPTH * WIDTH) + ", ""),)


@mutant_of("sampler")
class PickKeepsWhatTopPDrops(Variant):
    """In gathered rows top_p is compared with the mass of gathered tokens, not of all."""

    changes = (
        Change(
            "pick",
            "        if top_p < 1.0:\n            mass",
            "        if top_p < 1.0:\n            total = tl.sum(weights, axis=0)\n            mass",
        ),
    )


@mutant_of("sampler")
class PickKeepsOneMore(Variant):
    """In gathered rows a token with top_k tokens before it is kept."""

    changes = (Change("pick", "is_kept = count < top_k", "is_kept = count <= top_k"),)


@mutant_of("sampler")
class GreedyTakesTheFirstSlice(Variant):
    """Greedy rows of a mixed batch take the lowest id among the slices' best, not only among the largest."""

    changes = (
        Change(
            "pick",
            "lowest_id(\n                is_largest & is_slice,",
            "lowest_id(\n                is_slice,",
        ),
    )


@mutant_of("sampler")
class CheckOfTheFirstRow(Variant):
    """Proposals are judged by the mass before those of the batch's first row."""

    changes = (Change("check", "masses_ptr + 2 * row * num_slices", "masses_ptr"),)


@mutant_of("sampler")
class SecondJudgedAsTheFirst(Variant):
    """The mass before the first proposal is taken for that before the second one, too."""

    changes = (Change("check", "tl.load(masses + 1,", "tl.load(masses,"),)


@mutant_of("sampler")
class CheckLeavesTheFirst(Variant):
    """A first proposal that the filters drop is taken all the same."""

    changes = (Change("check", "tl.sum(counts & 0xFFFF, axis=0), mass", "0, mass"),)
