# --8<-- [start:toy-request]
from dataclasses import dataclass, field


@dataclass
class Request:
    name: str
    prompt_len: int
    answer_len: int
    output: list = field(default_factory=list)  # the step that computed each token


class ToyScheduler:
    """Continuous batching without a model: a step gives each request one token."""

    def __init__(self, max_running):
        self.max_running = max_running
        self.waiting, self.running, self.num_steps = [], [], 0
        # --8<-- [end:toy-request]

    # --8<-- [start:toy-step]
    def next_batch(self):
        """Prompts first; else one token for every running request."""
        num_free = self.max_running - len(self.running)
        new, self.waiting = self.waiting[:num_free], self.waiting[num_free:]
        if new:
            self.running += new
            return "prefill", new
        return "decode", list(self.running)

    def step(self):
        kind, batch = self.next_batch()
        for req in batch:
            req.output.append(self.num_steps)  # a prefill step computes the first token of the answer
        self.running = [req for req in self.running if len(req.output) < req.answer_len]
        self.num_steps += 1
        return kind, [req.name for req in batch]
        # --8<-- [end:toy-step]
