"""Planted bugs in linear attention: the traps of states that live in rows."""

from __future__ import annotations

from typing import Any

import torch

from diptych.reference.linear_attention import LinearAttention
from diptych.shared.interfaces.linear_attention import LinearLayer
from diptych.shared.types import ForwardBatch, ForwardMode
from tests.conformance.mutants.mutant import bugs_in, mutant_of

REFERENCE = bugs_in("linear_attention", "reference.linear_attention:LinearAttention", folder="reference.")
OPTIMIZED = bugs_in("linear_attention", "optimized.linear_attention:LinearAttention", folder="optimized.")
FILE = "linear_attention"


@mutant_of("linear_attention")
class KeepsARow(LinearAttention):
    """A new request goes on with the state of the row's last one."""

    def plan(self, forward_batch: ForwardBatch) -> Any:
        is_nan = self.pool.recurrent.isnan().flatten(2).all(-1).all(0).tolist()
        return [
            tokens._replace(is_first=tokens.is_first and is_nan[tokens.row])
            for tokens in super().plan(forward_batch)
        ]


@mutant_of("linear_attention")
class CountsByItself(LinearAttention):
    """How many tokens a row has seen is what this engine has computed."""

    def plan(self, forward_batch: ForwardBatch) -> Any:
        self.pool.num_seen = getattr(self, "num_seen", self.pool.num_seen)
        plan = super().plan(forward_batch)
        self.num_seen = self.pool.num_seen.clone()
        return plan


@mutant_of("linear_attention")
class WritesAllRows(LinearAttention):
    """A step rewrites the states of rows that are not in it."""

    def run(self, u: Any, g: Any, beta: Any, layer: LinearLayer, plan: Any) -> torch.Tensor:
        output = super().run(u, g, beta, layer, plan)
        self.pool.recurrent[layer.layer_id].nan_to_num_()
        return output


REFERENCE(
    "ForgetsInputs", "The convolution of a step begins with zeros.",
    (FILE, "torch.cat((inputs[row],", "torch.cat((torch.zeros_like(inputs[row]),"),
)  # fmt: skip
REFERENCE(
    "GatesAfterTheCorrection", "The state decays after the correction instead of before it.",
    (FILE, "state = g.exp()[:, :, None] * state\n    remembered", "remembered"),
    (FILE, "state = state + k[", "state = g.exp()[:, :, None] * state + k["),
)  # fmt: skip
REFERENCE(
    "HeadsTakeTurns", "Value head h reads key head h % num_k_heads.",
    (FILE, "x.repeat_interleave(repeats, dim=1)", "x.repeat(1, repeats, 1)"),
)  # fmt: skip
REFERENCE(
    "DecaysValues", "A decay for each channel is that of the channels of v.",
    (FILE, "g.exp()[:, :, None] * state", "(g.exp()[:, :, None] if g.shape[1] == 1 else "
     "torch.nn.functional.interpolate(g.exp()[:, None], state.shape[2])) * state"),
)  # fmt: skip
REFERENCE(
    "DividesByDecay", "The decay is taken as a quotient of two powers, which overflow.",
    (FILE, "state = g.exp()[:, :, None] * state",
     "e = (-g)[:, :, None].exp()\n    state = state / (e * e) * e"),
)  # fmt: skip

REFERENCE(
    "StoresTheLastState", "A checkpoint inside a step has the state at the end of the step.",
    (FILE, "states[target] = state", "states[row] = state"),
    (FILE, "            if are_drafts:", "            for _, target in stores:\n                "
     "states[target] = states[row]\n            if are_drafts:"),
)  # fmt: skip
REFERENCE(
    "StoresNoInputs", "A checkpoint has the recurrent state alone.",
    (FILE, "inputs[target] = seen", "inputs[row] = seen"),
)  # fmt: skip
REFERENCE(
    "RollsBackOneTooMany", "The last draft that was accepted does not come into the state.",
    (FILE, "accepted(forward_batch).tolist()", "accepted(forward_batch).sub(1).clamp(min=0).tolist()"),
)  # fmt: skip


@mutant_of("linear_attention")
class StoresNothingInMixedSteps(LinearAttention):
    """A mixed step copies no state into a checkpoint."""

    def plan(self, forward_batch: ForwardBatch) -> Any:
        num = 1 if forward_batch.forward_mode is ForwardMode.MIXED else None  # the row itself is the last one
        return [
            each._replace(stores=each.stores[-num:] if num else each.stores)
            for each in super().plan(forward_batch)
        ]


@mutant_of("linear_attention")
class LoadsLate(LinearAttention):
    """A state is loaded when its layer runs: a store of the same step may have overwritten it."""

    def plan(self, forward_batch: ForwardBatch) -> Any:
        self.late, self.pool.loads = dict(self.pool.loads), {}
        plan = super().plan(forward_batch)
        plan.sort(key=lambda tokens: tokens.row in self.late)
        return plan

    def run(self, u: Any, g: Any, beta: Any, layer: LinearLayer, plan: Any) -> torch.Tensor:
        outputs = []
        for tokens in plan:
            if tokens.row in self.late:
                source = self.late[tokens.row]
                self.pool.inputs[:, tokens.row] = self.pool.inputs[:, source]
                self.pool.recurrent[:, tokens.row] = self.pool.recurrent[:, source]
            outputs.append((tokens.start, super().run(u, g, beta, layer, [tokens])))
        return torch.cat([output for _, output in sorted(outputs, key=lambda each: each[0])])


TABLES = "kernels.recurrence.step_tables"
OPTIMIZED(
    "PaddingIsLive", "Padding of a decode step has the row of a request.",
    (TABLES, "PADDING = Tokens(0, 0, 1, ())", "PADDING = Tokens(1, 0, 1, ())"),
)  # fmt: skip
OPTIMIZED(
    "StoresOfTheCapture", "A replayed step copies no state into a checkpoint.",
    (TABLES, "[tables.requests, tables.stores[:num_stores]], [steps.requests, steps.stores]",
     "[tables.requests], [steps.requests]"),
)  # fmt: skip
OPTIMIZED(
    "SaysItIsDeterministic", "Prompts go in chunks, whose sums round in another order than the recurrence.",
    (FILE, "supports_drafts = True", "supports_drafts = is_deterministic = True"),
)  # fmt: skip
OPTIMIZED(
    "HoldsNoGates", "Decay and write strength of accepted drafts are those of an earlier step.",
    ("kernels.recurrence.convolve", "if tl.program_id(1) == 0:", "if tl.program_id(1) < 0:"),
)  # fmt: skip
OPTIMIZED(
    "MovesInputsEarly", "The first value head of a key head replaces the inputs that the others read.",
    ("kernels.recurrence.decode_step", "== READERS - 1", "== 0"),
)  # fmt: skip
