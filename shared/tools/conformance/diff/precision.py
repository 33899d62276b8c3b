"""Measures how another precision or checkpoint of the same model shape changes layers, ops and logits.

Both engines compute the same texts: prompts with A's greedy answers. B computes each text three times. First
without changes: errors accumulate from layer to layer. Then with the output of every layer replaced by A's:
each layer gets A's input, so the error of its output is its own. Then with the output of every op replaced by
A's, which does the same for each op inside a layer. So a loss is attributed to a layer and an op."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from diptych.shared.engine.llm import LLM
from diptych.shared.tools.conformance.clauses.closeness import compare_rows
from diptych.shared.tools.conformance.clauses.tolerance import EXACT
from diptych.shared.tools.conformance.diff.outcome import layer_of
from diptych.shared.tools.conformance.diff.recorder import EXPERTS, Key, Recorder
from diptych.shared.tools.conformance.diff.token_choice import TokenErrors, compare_logits
from diptych.shared.types import FinishLength, SamplingParams

WHOLE_TEXT = SamplingParams(max_new_tokens=0, return_logprob=True, logprob_start_len=0)
"""The log-probability of every token is asked for, so the engine computes every token's hidden state."""
EMBEDDING, NORM, HEAD = "embed_tokens", "norm", "lm_head"
LAYER_KINDS = ("embedding", "layer")
COMPOSITE = ("layer", EXPERTS, "ids")  # made of other ops, or no floats


@dataclass
class Mean:
    """The mean of the relative errors ‖a - b‖ / ‖a‖ of tokens."""

    total: float = 0.0
    count: int = 0

    def add(self, ratios: torch.Tensor) -> None:
        self.total += float(ratios.sum())
        self.count += len(ratios)

    @property
    def value(self) -> float:
        return self.total / self.count if self.count else 0.0


@dataclass
class Precision:
    """Errors are means over the tokens of all texts. `own`: computed from A's input."""

    accumulated: dict[str, Mean] = field(default_factory=dict)  # op -> error, each side on its own
    own_layers: dict[str, Mean] = field(default_factory=dict)  # "layers.3" -> error of its output
    added: dict[str, Mean] = field(default_factory=dict)  # the same error, relative to what the layer adds
    own_ops: dict[str, Mean] = field(default_factory=dict)
    other_experts: Mean = field(default_factory=Mean)  # share of routings that choose another set
    tokens: TokenErrors = field(default_factory=TokenErrors)
    texts: list[list[int]] = field(default_factory=list)  # token ids: prompt and answer

    @property
    def worst_layer(self) -> str | None:
        """The layer with the largest own error; None: no layer has any."""
        return _largest(self.own_layers)

    def worst_op(self, layer: str) -> str | None:
        return _largest({op: mean for op, mean in self.own_ops.items() if op.startswith(f"{layer}.")})

    def sentence(self) -> str:
        """One sentence: the layer and op with the largest loss."""
        layer, outside = self.worst_layer, _largest(
            {op: mean for op, mean in self.own_ops.items() if layer_of(op) is None}
        )  # fmt: skip
        if layer is None:
            if outside is None:
                return "No layer loses anything: A and B compute the same values."
            return f"No layer loses anything; {outside} changes by {self.own_ops[outside].value:.2%}."
        text = (
            f"Layer {layer_of(layer)} loses most: from the same input its output changes by "
            f"{self.own_layers[layer].value:.2%}"
        )
        op = self.worst_op(layer)
        if op is not None:
            inside = op.removeprefix(f"{layer}.")
            text += f"; inside it, {inside} loses most, {self.own_ops[op].value:.2%}"
        if outside is not None and self.own_ops[outside].value > self.own_layers[layer].value:
            text += f". Outside the layers, {outside} changes by {self.own_ops[outside].value:.2%}"
        return f"{text}."


@dataclass
class Run:
    """The results of one text in one engine: op -> [num_tokens, ...], on the engine's device."""

    tensors: dict[str, torch.Tensor]
    kinds: dict[str, str]
    logits: torch.Tensor  # [num_tokens, vocab_size]


def check_same_shape(a: LLM, b: LLM) -> None:
    """Raises `ValueError` unless the layers and tokens of the two models correspond."""
    for name in ("num_hidden_layers", "hidden_size", "vocab_size"):
        of_a, of_b = getattr(a.model_config, name), getattr(b.model_config, name)
        if of_a != of_b:
            raise ValueError(
                f"A and B must have one model shape: {name} is {of_a} in {a.config.model} and {of_b} in "
                f"{b.config.model}"
            )


def measure(
    a: LLM,
    b: LLM,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    on_text: Callable[[int], None] = lambda num_texts: None,
) -> Precision:
    """A answers the prompts with `params`, then both compute prompts and answers. Both engines need
    `disable_radix_cache`. Raises `ValueError` for models of different shapes."""
    check_same_shape(a, b)
    answers = a.generate(list(prompts), params, progress=False)
    assert isinstance(answers, list)
    found = Precision()
    recorders = Recorder(a), Recorder(b)
    try:
        for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            ids = [*prompt, *answer.output_ids]
            of_a, free = run_text(a, recorders[0], ids), run_text(b, recorders[1], ids)
            by_layer = run_text(b, recorders[1], ids, of_a, lambda kind: kind in LAYER_KINDS)
            by_op = run_text(b, recorders[1], ids, of_a, lambda kind: kind not in COMPOSITE)
            _add_text(found, of_a, free, by_layer, by_op)
            choices = compare_logits(of_a.logits, free.logits, ids, number, len(prompt))
            found.tokens.add(choices)
            found.texts.append(ids)
            on_text(number + 1)
    finally:
        for recorder in recorders:
            recorder.close()
    return found


def run_text(
    llm: LLM,
    recorder: Recorder,
    ids: list[int],
    teacher: Run | None = None,
    is_forced: Callable[[str], bool] = lambda kind: False,
) -> Run:
    """The results of every op for one text. Ops whose kind `is_forced` continue with the teacher's
    results."""

    def force(op: str, kind: str, keys: list[Key | None]) -> torch.Tensor | None:
        if teacher is None or not is_forced(kind) or op not in teacher.tensors:
            return None
        return teacher.tensors[op][[key[1] if key is not None else 0 for key in keys]]

    recorder.force_op = force
    (collector,) = llm.submit(ids, WHOLE_TEXT)
    tensors: dict[str, list[torch.Tensor]] = {}
    kinds: dict[str, str] = {}
    while not collector.is_finished and llm.step():
        for record in recorder.take():  # a long text is computed in several chunks
            kinds |= record.kinds
            for op, tensor in record.tokens.tensors.items():
                tensors.setdefault(op, []).append(tensor)
    recorder.force_op = None
    if not isinstance(collector.finish_reason, FinishLength):
        raise RuntimeError(f"a text of {len(ids)} tokens: {collector.finish_reason}")
    whole = {op: torch.cat(parts) for op, parts in tensors.items()}
    whole = {op: tensor for op, tensor in whole.items() if len(tensor) == len(ids)}
    with torch.inference_mode():
        logits = llm.assembly.model.compute_logits(whole[NORM])
    return Run(whole, kinds, logits)


def _add_text(found: Precision, a: Run, free: Run, by_layer: Run, by_op: Run) -> None:
    below = a.tensors.get(EMBEDDING)
    for op, tensor in a.tensors.items():
        if op not in free.tensors or tensor[0].numel() != free.tensors[op][0].numel():
            continue  # one side fuses the op, or splits it over ranks
        kind = a.kinds[op]
        if kind == EXPERTS:
            differ = (tensor != free.tensors[op]).any(dim=1)
            found.other_experts.add(differ.double())
        if kind in ("ids", EXPERTS):
            continue
        _note(found.accumulated, op, _errors(tensor, free.tensors[op]))
        if kind == "layer":
            own = _errors(tensor, by_layer.tensors[op])
            _note(found.own_layers, op, own)
            if below is not None:
                norms = [_norms(tensor), _norms(tensor.double() - below.double())]
                _note(found.added, op, own * norms[0] / norms[1].clamp(min=1e-300))
            below = tensor
        else:
            _note(found.own_ops, op, _errors(tensor, by_op.tensors[op]))
    _note(found.accumulated, HEAD, _errors(a.logits, free.logits))
    _note(found.own_ops, HEAD, _errors(a.logits, by_op.logits))


def _errors(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """‖a - b‖ / ‖a‖ of each token, float64 [num_tokens]."""
    return compare_rows(a.cpu().double(), b.cpu().double().view_as(a), EXACT)[0]


def _norms(x: torch.Tensor) -> torch.Tensor:
    return x.cpu().double().flatten(1).norm(dim=1)


def _note(means: dict[str, Mean], op: str, ratios: torch.Tensor) -> None:
    means.setdefault(op, Mean()).add(ratios)


def _largest(means: dict[str, Mean]) -> str | None:
    op = max(means, key=lambda op: means[op].value, default=None)
    return op if op is not None and means[op].value > 0 else None


def pattern_of(op: str) -> str:
    """One name for all layers: layers.3.mlp.down_proj -> mlp.down_proj."""
    return re.sub(r"^layers\.\d+\.", "", op)
