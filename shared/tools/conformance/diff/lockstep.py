"""Runs two engines in lockstep on the same prompts and finds the first result that differs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from diptych.shared.engine.llm import LLM
from diptych.shared.engine.requests.prompts import Prompt
from diptych.shared.tools.conformance.clauses.closeness import allowed_between, compare_rows, error_ratio
from diptych.shared.tools.conformance.clauses.tolerance import EXACT, NEAR_TIE
from diptych.shared.tools.conformance.diff.outcome import Divergence, NearTie, Outcome, SchedulesPart
from diptych.shared.tools.conformance.diff.recorder import (
    EXPERTS,
    LOGITS,
    SAMPLED_IDS,
    Key,
    Recorder,
    Rows,
    StepRecord,
)
from diptych.shared.tools.conformance.diff.side import MAX_IDLE_STEPS, Side
from diptych.shared.tools.conformance.diff.teacher import Teacher
from diptych.shared.tools.conformance.oracles.router_ties import experts_part
from diptych.shared.types import FinishError, SamplingParams


class Lockstep:
    """Runs A and B on the same prompts and compares what both compute for the same token of the same request,
    in whatever batch, chunk or step. Input ids and ops are compared as soon as both sides have them, then
    logits within the table's tolerance, then sampled ids exactly.

    Where the sampled ids differ although the logits are close, and the gap between the two tokens in A's
    logits is below NEAR_TIE, both are correct: the request is not compared further. The same holds if a
    token's experts differ although the router's logits are close. With `teacher_forced`, B continues with A's
    tokens and A's experts, and everything after a tie is compared with the same strictness.
    `strict_schedule`: different batches are a divergence too. `graphs`: CUDA graphs stay on; of replayed
    steps only logits and ids are compared, and experts are neither recorded nor forced.

    Two engines of one panel in deterministic mode are compared bit for bit, and near ties are not accepted.
    """

    def __init__(
        self, a: LLM, b: LLM, *, labels: tuple[str, str] = ("A", "B"), teacher_forced: bool = False,
        strict_schedule: bool = False, graphs: bool = False,
    ) -> None:  # fmt: skip
        self.a = Side(labels[0], a, Recorder(a, graphs))
        self.b = Side(labels[1], b, Recorder(b, graphs))
        self.teacher_forced = teacher_forced
        self.strict_schedule = strict_schedule
        self.dtype = max((self.a.dtype, self.b.dtype), key=lambda dtype: torch.finfo(dtype).eps)
        self.is_exact = (
            a.config.deterministic and b.config.deterministic and a.config.panel == b.config.panel
            and self.a.dtype == self.b.dtype
        )  # fmt: skip
        self.outcome = Outcome(labels, self.dtype)
        self.inherited = 0.0  # the largest relative error accepted so far
        self.given_up: set[str] = set()
        if teacher_forced:
            teacher = Teacher(self.a, self.b)
            self.b.recorder.force = teacher.tokens
            self.b.recorder.force_experts = teacher.experts

    def run(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        max_steps: int | None = None,
        on_step: Callable[[Outcome], None] = lambda outcome: None,
    ) -> Outcome:
        """Run until a result diverges, both sides have finished, or one has run `max_steps` batches."""
        try:
            for side in (self.a, self.b):
                for i, prompt in enumerate(prompts):
                    side.collectors += side.llm.submit(prompt, params, rid=f"prompt-{i}")
            for side in self._steps(max_steps):
                self.outcome.divergence = self._compare_new() or self._ends(side)
                on_step(self.outcome)
                if self.outcome.divergence is not None:
                    break
            self.outcome.finished = not (self.a.has_work() or self.b.has_work())
        finally:
            self._close()
        return self.outcome

    def _steps(self, max_steps: int | None) -> Iterator[Side]:
        """Step A and B in turn; yields the side that has just stepped."""
        while self.a.has_work() or self.b.has_work():
            for side in (self.a, self.b):
                if side.has_work():
                    side.step()
                yield side
            if max_steps is not None and max(self.a.num_steps, self.b.num_steps) >= max_steps:
                return

    def _close(self) -> None:
        for side in (self.a, self.b):
            side.recorder.close()
            for collector in side.collectors:
                side.llm.abort(collector.rid)
        a, b = (sum(key[0] not in self.given_up for key in side.pending) for side in (self.a, self.b))
        self.outcome.num_one_sided = (a, b)
        self.outcome.num_steps = (self.a.num_steps, self.b.num_steps)

    # ---- what to compare ----

    def _compare_new(self) -> Divergence | None:
        if (divergence := self._compare_schedules()) is not None:
            return divergence
        groups: dict[tuple[int, int], list[Key]] = {}
        for key, (record_b, _) in self.b.pending.items():
            if key in self.a.pending and key[0] not in self.given_up:
                record_a, _ = self.a.pending[key]
                groups.setdefault((record_b.step, record_a.step), []).append(key)
        for _, keys in sorted(groups.items()):
            records = self.a.pending[keys[0]][0], self.b.pending[keys[0]][0]
            rows = [self.a.pending.pop(key)[1] for key in keys], [self.b.pending.pop(key)[1] for key in keys]
            found = self._compare_tokens(records, keys, rows) or self._compare_heads(records, keys)
            self.outcome.num_tokens += len(keys)
            if found is not None:
                return found
        return None

    def _compare_schedules(self) -> Divergence | None:
        while self.a.history and self.b.history:
            a, b = self.a.history.pop(0), self.b.history.pop(0)
            if self.outcome.schedules_part is not None or self.given_up:
                continue
            for what, value in a.schedule.items():
                if value != b.schedule[what]:
                    part = SchedulesPart(a.step, what, value, b.schedule[what])
                    self.outcome.schedules_part = part
                    if self.strict_schedule:
                        return Divergence.of_schedule(part, self.outcome.labels, b.forward_mode.name)
                    break
        return None

    def _compare_tokens(
        self, records: tuple[StepRecord, StepRecord], keys: list[Key], rows: tuple[list[int], list[int]]
    ) -> Divergence | None:
        if not keys:
            return None
        a, b = records
        self._note_one_sided(a, b)
        for op, tensor in a.tokens.tensors.items():
            if op not in b.tokens.tensors:
                continue
            if tensor[0].numel() != b.tokens.tensors[op][0].numel():
                for only, one in zip(self.outcome.only, (tensor, b.tokens.tensors[op])):
                    only.add(f"{op} {list(one.shape[1:])}")
                continue
            rows_a, rows_b = tensor[rows[0]], b.tokens.tensors[op][rows[1]]
            if records[0].kinds[op] == EXPERTS and not self.is_exact:
                self._level_experts(records, op, keys, rows, (rows_a, rows_b))
                kept = [i for i, key in enumerate(keys) if key[0] not in self.given_up]
                if len(kept) < len(keys):
                    others = [rows[0][i] for i in kept], [rows[1][i] for i in kept]
                    return self._compare_tokens(records, [keys[i] for i in kept], others)
            divergence = self._compare_rows(records, op, keys, rows_a, rows_b.view_as(rows_a))
            if divergence is not None:
                assert divergence.found is not None
                row = divergence.found.row
                divergence.token_errors = self._errors_of_token(records, rows[0][row], rows[1][row])
                return divergence
        return None

    def _level_experts(
        self, records: tuple[StepRecord, StepRecord], op: str, keys: list[Key],
        rows: tuple[list[int], list[int]], chosen: tuple[torch.Tensor, torch.Tensor],
    ) -> None:  # fmt: skip
        """Note the tokens whose experts [len(keys), k] differ at a near tie, and replace B's experts by
        A's."""
        gate = f"{op.rpartition('.')[0]}.gate"
        for i in (chosen[0] != chosen[1]).any(dim=1).nonzero().flatten().tolist():
            logits = [record.tokens.tensors.get(gate) for record in records]
            gates = [None if one is None else one[where[i]] for one, where in zip(logits, rows)]
            what = experts_part(self.a.llm.model_config, (gates[0], gates[1]), (chosen[0][i], chosen[1][i]))
            if what is not None:
                self._near_tie(keys[i], records, op, what)
                chosen[1][i] = chosen[0][i]
                if not self.teacher_forced:
                    self._give_up(keys[i][0])

    def _compare_heads(self, records: tuple[StepRecord, StepRecord], keys: list[Key]) -> Divergence | None:
        a, b = (_row_of(record.heads) for record in records)
        both = [key for key in keys if key in a and key in b and key[0] not in self.given_up]
        both = [key for key in both if self.a.is_sampled_for_real(key)]
        if not both:
            return None
        rows = [a[key] for key in both], [b[key] for key in both]
        heads = records[0].heads.tensors, records[1].heads.tensors
        logits = heads[0][LOGITS][rows[0]], heads[1][LOGITS][rows[1]]
        divergence = self._compare_rows(records, LOGITS, both, *logits)
        if divergence is not None or SAMPLED_IDS not in heads[0] or SAMPLED_IDS not in heads[1]:
            return divergence
        ids = heads[0][SAMPLED_IDS][rows[0]], heads[1][SAMPLED_IDS][rows[1]]
        for i, key in enumerate(both):
            id_a, id_b = int(ids[0][i]), int(ids[1][i])
            gap = self._gap(logits[0][i], logits[1][i], id_a, id_b)
            if id_a != id_b and gap is not None:
                what = f"token {id_a} or {id_b}: logits {gap:.2g} apart, less than {NEAR_TIE[self.dtype]:g}"
                self._near_tie(key, records, SAMPLED_IDS, what)
                if not self.teacher_forced:
                    self._give_up(key[0])
                ids[1][i] = id_a
        return self._compare_rows(records, SAMPLED_IDS, both, *ids)

    def _gap(self, a: torch.Tensor, b: torch.Tensor, id_a: int, id_b: int) -> float | None:
        """The difference of two tokens in A's logits if it is a near tie. With equal logits both sides must
        take the same token."""
        if self.is_exact or min(id_a, id_b) < 0 or torch.equal(a, b):
            return None
        gap = abs(float(a[id_a] - a[id_b]))
        return gap if gap < NEAR_TIE[self.dtype] else None

    def _compare_rows(
        self, records: tuple[StepRecord, StepRecord], op: str, keys: list[Key], a: torch.Tensor,
        b: torch.Tensor,
    ) -> Divergence | None:  # fmt: skip
        """Compare a, b [len(keys), ...], the results of the two sides for the same tokens."""
        kind = records[0].kinds[op]
        limit_kind = kind if kind != "embedding" or self.a.dtype == self.b.dtype else "elementwise"
        limit = EXACT if self.is_exact else allowed_between(limit_kind, self.dtype, self.inherited)
        ratios, found = compare_rows(a, b, limit)
        largest = int(ratios.argmax())
        self.outcome.note(op, kind, float(ratios[largest]), keys[largest], limit.rms)
        if found is None:
            if kind not in ("ids", EXPERTS, "logits"):
                self.inherited = max(self.inherited, float(ratios[largest]))
            return None
        return Divergence(
            labels=self.outcome.labels,
            steps=(records[0].step, records[1].step),
            forward_mode=records[1].forward_mode.name,
            key=keys[found.row],
            num_prompt_tokens=len(self.a.recorder.reqs[keys[found.row][0]].origin_input_ids),
            op=op,
            kind=kind,
            found=found,
            limit=limit,
            keys=keys,
            tensors=(a, b),
        )

    def _errors_of_token(
        self, records: tuple[StepRecord, StepRecord], row_a: int, row_b: int
    ) -> dict[str, float]:
        """Relative error of every op for one token, also after the op at which it diverged."""
        errors: dict[str, float] = {}
        for op, tensor in records[0].tokens.tensors.items():
            other = records[1].tokens.tensors.get(op)
            if other is not None and other[0].numel() == tensor[0].numel():
                a, b = tensor[row_a], other[row_b]
                errors[op] = error_ratio(a, b.view_as(a))
        return errors

    # ---- beside the numbers ----

    def _near_tie(self, key: Key, records: tuple[StepRecord, StepRecord], op: str, what: str) -> None:
        self.outcome.near_ties.append(NearTie((records[0].step, records[1].step), key, op, what))

    def _give_up(self, rid: str) -> None:
        self.given_up.add(rid)
        for side in (self.a, self.b):
            side.llm.abort(rid)

    def _note_one_sided(self, a: StepRecord, b: StepRecord) -> None:
        for only, own, other in zip(self.outcome.only, (a, b), (b, a)):
            only.update(own.tokens.tensors.keys() - other.tokens.tensors.keys())

    def _ends(self, side: Side) -> Divergence | None:
        """Requests that ended in an error or with different reasons on the two sides; a side that is
        stuck."""
        if side.is_stuck:
            return Divergence.of_run(
                self.outcome.labels,
                f"{side.label}: no new token in {MAX_IDLE_STEPS} steps, though there is work",
            )
        for a, b in zip(self.a.collectors, self.b.collectors):
            if a.rid in self.given_up:
                continue
            for one, label in ((a, self.a.label), (b, self.b.label)):
                if isinstance(one.finish_reason, FinishError):
                    what = f"{label}: {one.rid} ended in an error: {one.finish_reason.message}"
                    return Divergence.of_run(self.outcome.labels, what)
            if a.finish_reason is None or b.finish_reason is None:
                continue
            if (a.finish_reason, a.output_ids) != (b.finish_reason, b.output_ids):
                ends = (
                    f"on {label} with {one.finish_reason} after {one.num_output_tokens} tokens"
                    for label, one in zip(self.outcome.labels, (a, b))
                )
                return Divergence.of_run(self.outcome.labels, f"{a.rid} ended {', '.join(ends)}")
        return None


def _row_of(rows: Rows) -> dict[Key, int]:
    return {key: row for row, key in enumerate(rows.keys) if key is not None}
