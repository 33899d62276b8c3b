"""Clauses of loading weights into a draft model, and of weights that it shares with its target."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from diptych.shared.interfaces import DraftModel
from diptych.shared.loading.draft_weights import dummy_draft_weights
from diptych.shared.tools.conformance.clauses.clause import contract
from diptych.shared.tools.conformance.clauses.compare import expect_close, expect_form, expect_true
from diptych.shared.tools.conformance.clauses.device import check_device
from diptych.shared.tools.conformance.clauses.inputs import Inputs
from diptych.shared.tools.conformance.clauses.poison import poison_
from diptych.shared.tools.conformance.clauses.tolerance import EXACT, tolerance
from diptych.shared.tools.conformance.contracts.draft_models.forward import (
    HEADS,
    HEADS_ONCE,
    DraftModels,
    DraftSession,
    Head,
    drafted,
    make_draft,
    make_target,
    new_draft,
)
from diptych.shared.tools.conformance.contracts.models.weights import expect_refused

EAGLE3 = tuple(case for case in HEADS_ONCE if case.config().draft_format == "eagle3")
NORMED = tuple(case for case in EAGLE3 if case.config().norms.fusion != "none")
PART = tuple(case for case in HEADS_ONCE if "a part of the vocabulary" in case.name)
assert len(HEADS_ONCE) == len(HEADS)
assert (len(PART), len(NORMED)) == (1, 2)


def weights_of(case: Head) -> dict[str, torch.Tensor]:
    return dict(dummy_draft_weights(case.config(), case.seed))


def expect_loaded(draft: DraftModel, impl: DraftModels, case: Head) -> None:
    """Check that the draft model equals a plainly loaded one, bit for bit."""
    target = make_target(case)
    draft.share(target)
    expected = drafted(DraftSession(make_draft(impl, case, target)), case)
    for name, tensor in drafted(DraftSession(draft.eval()), case).items():
        expect_close(name, tensor, expected[name], EXACT)


@contract("Each tensor may be dropped once the next is asked for: nothing is kept but copies.", HEADS_ONCE)
def tensors_may_be_dropped(impl: DraftModels, case: Head) -> None:
    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights_of(case).items():
            yield name, tensor
            poison_(tensor)

    draft = new_draft(impl, case.config())
    draft.load_weights(weights())
    expect_loaded(draft, impl, case)


@contract('Built on "meta" it takes memory when its weights come, which may be in any order.', HEADS_ONCE)
def built_on_meta(impl: DraftModels, case: Head) -> None:
    draft = new_draft(impl, case.config(), device="meta")
    expect_true("built on meta", all(parameter.is_meta for parameter in draft.parameters()))
    with check_device():
        draft.load_weights(reversed(list(weights_of(case).items())))
    expect_loaded(draft, impl, case)


@contract('Names may have a leading "model.".', HEADS_ONCE)
def leading_model(impl: DraftModels, case: Head) -> None:
    draft = new_draft(impl, case.config())
    draft.load_weights((f"model.{name}", tensor) for name, tensor in weights_of(case).items())
    expect_loaded(draft, impl, case)


@contract("Unused tensors are skipped: RoPE's frequencies, and in EAGLE-3 the table t2d.", HEADS_ONCE)
def harmless_tensors(impl: DraftModels, case: Head) -> None:
    layer = "midlayer" if case.config().draft_format == "eagle3" else "layers.0"
    extra = {f"{layer}.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    if case.config().draft_format == "eagle3":
        extra["t2d"] = torch.ones(case.target_config.vocab_size, dtype=torch.bool)
    draft = new_draft(impl, case.config())
    draft.load_weights([*extra.items(), *weights_of(case).items()])
    expect_loaded(draft, impl, case)


@contract("A bias on fc is added where the checkpoint has one.", HEADS_ONCE)
def bias(impl: DraftModels, case: Head) -> None:
    weights = weights_of(case)
    if "fc.weight" not in weights or case.config().block is not None:
        return
    draft = new_draft(impl, case.config())
    draft.load_weights([*weights.items(), ("fc.bias", 2.0 * torch.ones(case.config().model.hidden_size))])
    target = make_target(case)
    draft.share(target)
    plain = drafted(DraftSession(make_draft(impl, case, target)), case)["step 0: next hidden states"]
    biased = drafted(DraftSession(draft.eval()), case)["step 0: next hidden states"]
    # In both formats it enters the residual stream: outputs change by it and by its effect in the layer.
    expect_true("the bias counts", bool((biased - plain).mean() > 0.5), float((biased - plain).mean()))


@contract(
    "EAGLE-3 with norms before fc: lengths of the target's states do not count, weights of each norm do.",
    NORMED,
)
def norms_before_fc(impl: DraftModels, case: Head) -> None:
    config, weights, target = case.config(), weights_of(case), make_target(case)
    states = Inputs(case.seed).normal(9, config.target_hidden_size)

    def output(weights: dict[str, torch.Tensor], states: torch.Tensor) -> torch.Tensor:
        draft = new_draft(impl, config)
        draft.load_weights(weights.items())
        draft.share(target)
        return DraftSession(draft.eval()).draft([*range(9)], states).hidden_states

    plain = output(weights, states)
    longer = output(weights, 4.0 * states)
    expect_close("of four times as long states", longer, plain, tolerance("logits", torch.float32))
    for name in weights:
        if name.startswith(("input_norm", "fc_norm")):
            changed = output({**weights, name: 3.0 * weights[name]}, states)
            expect_true(f"{name} counts", float((changed - plain).abs().max()) > 0.01)


@contract(
    "EAGLE-3: drafting continues from what compute_logits takes if norm_output says so, and only then.",
    EAGLE3,
)
def norm_output(impl: DraftModels, case: Head) -> None:
    config, target = case.config(), make_target(case)
    states = Inputs(case.seed).normal(9, config.target_hidden_size)
    output = DraftSession(make_draft(impl, case, target)).draft([*range(9)], states)
    is_normed = torch.equal(output.hidden_states, output.next_hidden_states)
    expect_true("whether it is normed", is_normed == config.norms.output, is_normed)


@contract(
    "share: a copy of the target's embedding or head in the checkpoint changes nothing; another embedding or "
    "head is used instead of the target's.",
    HEADS_ONCE,
)
def own_embedding_and_head(impl: DraftModels, case: Head) -> None:
    config, target = case.config(), make_target(case)
    with torch.inference_mode():
        embedding = target.embed(torch.arange(config.target.vocab_size, device=check_device())).cpu()
    inputs = Inputs(7)
    other = inputs.normal(config.model.vocab_size, config.model.hidden_size).cpu()
    head_name = "shared_head.head.weight" if config.draft_format == "nextn" else "lm_head.weight"
    weights = {**weights_of(case), "embed_tokens.weight": embedding, head_name: other}
    draft = new_draft(impl, config)
    draft.load_weights(weights.items())
    draft.share(target)
    plain = drafted(DraftSession(make_draft(impl, case, target)), case)
    own = drafted(DraftSession(draft.eval()), case)
    for name, tensor in own.items():
        if "logits" not in name:
            expect_close(name, tensor, plain[name], EXACT)
            continue
        hidden_states = own[name.replace("logits", "hidden states")]
        expected = hidden_states.cpu().double() @ other.double().T
        expect_close(name, tensor, expected.to(tensor.device), tolerance("logits", torch.float32))
    draft = new_draft(impl, config)
    draft.load_weights({**weights, "embed_tokens.weight": -embedding}.items())
    draft.share(target)
    name = "step 0: next hidden states" if config.block is None else "hidden states"
    negated = drafted(DraftSession(draft.eval()), case)[name]
    expect_true("another embedding is used", not torch.equal(negated, own[name]))


@contract(
    "share keeps no copy: what the target's head becomes is what the draft model uses.",
    tuple(case for case in HEADS_ONCE if "a part of the vocabulary" not in case.name),
)
def shared_not_copied(impl: DraftModels, case: Head) -> None:
    target = make_target(case)
    draft = make_draft(impl, case, target)
    hidden_states = Inputs(3).normal(5, case.config().model.hidden_size)
    with torch.inference_mode():
        before = draft.compute_logits(hidden_states)
        for parameter in target.parameters():
            parameter.mul_(2.0)
        expect_close("logits", draft.compute_logits(hidden_states), 2.0 * before, EXACT)


@contract("A draft vocabulary that is a part of the target's needs a head of its own, and d2t.", PART)
def part_of_the_vocabulary(impl: DraftModels, case: Head) -> None:
    config, weights = case.config(), weights_of(case)
    sizes = (str(config.model.vocab_size), str(config.target.vocab_size))
    draft = new_draft(impl, config)
    draft.load_weights((name, tensor) for name, tensor in weights.items() if name != "lm_head.weight")
    expect_refused("no head", lambda: draft.share(make_target(case)), "lm_head", *sizes)
    headless = new_draft(impl, config)
    without = [(name, tensor) for name, tensor in weights.items() if name != "d2t"]
    expect_refused("no d2t", lambda: headless.load_weights(without), "d2t", *sizes)
    d2t = weights["d2t"]
    outside = d2t.clone()
    outside[-1] = config.target.vocab_size - (config.model.vocab_size - 1)
    twice = d2t.clone()
    twice[1] = d2t[0] - 1
    for what, table in (("outside", outside), ("twice", twice)):
        draft = new_draft(impl, config)
        wrong = {**weights, "d2t": table}
        expect_refused(what, partial(draft.load_weights, wrong.items()), "d2t")


@contract("A draft model that is not as wide as its target needs an embedding and a head of its own.", PART)
def another_width(impl: DraftModels, case: Head) -> None:
    config, target = case.config(), make_target(case)
    config = replace(config, model=replace(config.model, hidden_size=config.model.hidden_size + 4))
    weights = dict(dummy_draft_weights(config, case.seed))
    sizes = (str(config.model.hidden_size), str(config.target.hidden_size))
    for missing in ("embed_tokens", "lm_head"):
        draft = new_draft(impl, config)
        draft.load_weights((name, x) for name, x in weights.items() if name != f"{missing}.weight")
        expect_refused(f"no {missing}", partial(draft.share, target), missing, *sizes)
    draft = new_draft(impl, config)
    draft.load_weights(weights.items())
    draft.share(target)
    states = Inputs(case.seed).normal(7, config.target_hidden_size)
    output = DraftSession(draft.eval()).draft([*range(7)], states)
    like = states.new_empty(7, config.model.hidden_size)
    expect_form("hidden states", output.hidden_states, like=like, dtype=torch.float32)
    expect_form("next hidden states", output.next_hidden_states, like=like, dtype=torch.float32)


@contract("A tensor of the wrong shape is refused: which, what came, and what would be right.", HEADS_ONCE)
def wrong_shape(impl: DraftModels, case: Head) -> None:
    config, weights = case.config(), weights_of(case)
    optional = {"embed_tokens.weight": torch.zeros(config.target.vocab_size, config.model.hidden_size)}
    for name, tensor in {**weights, **optional}.items():
        wrong = torch.zeros(tensor.shape[0] + 1, *tensor.shape[1:], dtype=tensor.dtype)
        draft = new_draft(impl, config)
        changed = {**weights, name: wrong}
        part = name.removeprefix("layers.0.").removeprefix("shared_head.")
        sizes = [str(size) for size in (*wrong.shape, *tensor.shape)]
        expect_refused(name, partial(draft.load_weights, changed.items()), part, *sizes)


@contract(
    "A name that the format does not have is refused, one that comes twice, and one that never came.",
    HEADS_ONCE,
)
def wrong_names(impl: DraftModels, case: Head) -> None:
    config, weights = case.config(), weights_of(case)
    for extra in ("lm_head.bias", "transformer.wte.weight", *list(weights)[:1]):
        draft = new_draft(impl, config)
        more = [*weights.items(), (extra, weights.get(extra, torch.ones(3)))]
        part = extra.removeprefix("layers.0.")
        expect_refused(extra, partial(draft.load_weights, more), part)
    for name in weights:
        if name not in ("lm_head.weight", "d2t"):
            draft = new_draft(impl, config)
            fewer = [(n, tensor) for n, tensor in weights.items() if n != name]
            part = name.removeprefix("layers.0.").removeprefix("shared_head.")
            expect_refused(name, partial(draft.load_weights, fewer), part)
