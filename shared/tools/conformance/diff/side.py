"""One engine of a comparison: its requests, and the results that the other engine does not have yet."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from diptych.shared.engine.llm import LLM
from diptych.shared.engine.requests.output_collector import OutputCollector
from diptych.shared.tools.conformance.diff.recorder import SAMPLED_IDS, Key, Recorder, StepRecord
from diptych.shared.tools.conformance.oracles.router_ties import ChosenExperts

MAX_IDLE_STEPS = 1000
"""Steps in a row without a new token, while there is work, after which a side counts as stuck. (A retracted
request is computed again first: a long prompt in small chunks takes many steps.)"""


@dataclass
class Side:
    label: str
    llm: LLM
    recorder: Recorder
    collectors: list[OutputCollector] = field(default_factory=list)
    history: list[StepRecord] = field(default_factory=list)  # schedules not compared yet
    pending: dict[Key, tuple[StepRecord, int]] = field(default_factory=dict)  # -> record, row of its tokens
    seen: set[Key] = field(default_factory=set)
    sampled: dict[Key, int] = field(default_factory=dict)
    num_steps: int = 0
    num_idle_steps: int = 0

    def __post_init__(self) -> None:
        self.chosen_experts = ChosenExperts(self.recorder.reqs)

    @property
    def dtype(self) -> torch.dtype:
        parameters = self.llm.assembly.model.parameters()
        return next(p.dtype for p in parameters if p.is_floating_point())

    @property
    def is_stuck(self) -> bool:
        return self.num_idle_steps > MAX_IDLE_STEPS and self.has_work()

    def has_work(self) -> bool:
        return self.llm.scheduler.has_work()

    def step(self) -> None:
        self.llm.step()
        self.num_idle_steps += 1
        for record in self.recorder.take():
            record.tokens.to_cpu()
            record.heads.to_cpu()
            self.num_steps = record.step
            self.history.append(record)
            self.chosen_experts.note(record)
            for row, key in enumerate(record.tokens.keys):
                if key is not None and key not in self.seen:  # a retracted request is computed twice
                    self.seen.add(key)
                    self.num_idle_steps = 0
                    self.pending[key] = (record, row)
            if SAMPLED_IDS in record.heads.tensors:
                ids = record.heads.tensors[SAMPLED_IDS].tolist()
                for key, token_id in zip(record.heads.keys, ids):
                    if key is not None:
                        self.sampled.setdefault(key, token_id)

    def is_sampled_for_real(self, key: Key) -> bool:
        """False inside a chunked prompt: the token sampled there has no meaning."""
        return key[1] >= len(self.recorder.reqs[key[0]].origin_input_ids) - 1
