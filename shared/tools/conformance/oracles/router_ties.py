"""Near ties of a router: an allowed error of its logits can change the experts of a token. Both sides are
then correct and differ from there on, so B can be made to use A's experts."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate

import torch

from diptych.shared.config import ModelConfig, MoEConfig
from diptych.shared.interfaces import TopKOutput
from diptych.shared.tools.conformance.diff.recorder import EXPERTS, Key, StepRecord
from diptych.shared.types import Req

_SLACK = 1e-5
"""Routing compares softmax scores: where two logits are closer than float32 can tell in their scores, either
may count as the larger one. Relative to the largest logit."""


def experts_part(
    config: ModelConfig,
    gates: tuple[torch.Tensor | None, torch.Tensor | None],
    chosen: tuple[torch.Tensor, torch.Tensor],
) -> str | None:
    """Why a token's experts [k] differ: each side chose the best by its own router logits [num_experts],
    which were already found to be close. None: a side did not choose the best, or the model routes by another
    rule."""
    if config.moe is None or config.moe.routing != "softmax":
        return None
    for gate, ids in zip(gates, chosen):
        if gate is None or not _are_best(gate.float().cpu(), ids.tolist()):
            return None
    a, b = (set(ids.tolist()) for ids in chosen)
    left, taken = sorted(a - b), sorted(b - a)
    assert gates[0] is not None
    gap = max(float(gates[0][i] - gates[0][j]) for i in left for j in taken)
    return f"expert {left} or {taken}: router logits {gap:.2g} apart"


def take_experts(
    config: MoEConfig, router_logits: torch.Tensor, own: TopKOutput, ids: torch.Tensor
) -> TopKOutput:
    """Routing with the given experts [n, k] (-1: none given) for the first n tokens. A token whose own
    experts are the same keeps its weights; for other tokens they are computed from the token's own logits."""
    n = len(ids)
    ids = ids.to(device=own.topk_ids.device, dtype=own.topk_ids.dtype)
    parts = (ids >= 0).all(dim=1) & (ids != own.topk_ids[:n].sort(dim=1).values).any(dim=1)
    logits = router_logits[:n].float()
    scores = logits.sigmoid() if config.routing == "biased-grouped" else logits.softmax(dim=-1)
    weights = scores.gather(1, ids.clamp(min=0).long())
    if config.norm_topk_prob:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    topk_weights, topk_ids = own.topk_weights.clone(), own.topk_ids.clone()
    topk_weights[:n][parts] = weights[parts] * config.routed_scaling_factor
    topk_ids[:n][parts] = ids[parts]
    return TopKOutput(topk_weights, topk_ids)


def _are_best(gate: torch.Tensor, ids: list[int]) -> bool:
    others = torch.ones(len(gate), dtype=torch.bool)
    others[ids] = False
    slack = _SLACK * float(gate.abs().max())
    return not others.any() or float(gate[ids].min()) >= float(gate[others].max()) - slack


class ChosenExperts:
    """The experts that one side chose for each token. A token in its prefix cache was computed for another
    request with the same text; the experts of that computation count."""

    def __init__(self, reqs: Mapping[str, Req]) -> None:
        self._reqs = reqs
        self._of_token: dict[Key, dict[str, torch.Tensor]] = {}  # -> op -> [k]
        self._of_text: dict[int, Key] = {}  # hash of a prompt up to a token -> that token
        self._texts: dict[str, list[int]] = {}  # request id -> such a hash for each token of its prompt
        self._reached: dict[str, int] = {}  # request id -> the last position computed

    def note(self, record: StepRecord) -> None:
        tensors = record.tokens.tensors
        chosen = {op: tensors[op].cpu() for op, kind in record.kinds.items() if kind == EXPERTS}
        for row, key in enumerate(record.tokens.keys if chosen else ()):
            if key is not None and key not in self._of_token:
                self._of_token[key] = {op: ids[row] for op, ids in chosen.items()}
                self._reached[key[0]] = max(key[1], self._reached.get(key[0], -1))
                if (text := self._text(key)) is not None:
                    self._of_text.setdefault(text, key)

    def is_decided(self, key: Key) -> bool:
        """Whether the token was computed, or skipped because it was in the cache."""
        return self._reached.get(key[0], -1) >= key[1]

    def of(self, op: str, key: Key | None) -> torch.Tensor | None:
        if key is not None and key not in self._of_token:
            text = self._text(key)
            key = None if text is None else self._of_text.get(text)
        return None if key is None else self._of_token[key].get(op)

    def _text(self, key: Key) -> int | None:
        rid, position = key
        if rid not in self._texts:
            ids = self._reqs[rid].origin_input_ids
            self._texts[rid] = list(accumulate(ids, lambda before, token: hash((before, token)), initial=0))
        return self._texts[rid][position + 1] if position + 1 < len(self._texts[rid]) else None
