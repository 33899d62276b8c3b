"""New weights for an engine that runs: from a folder, from tensors and from a trainer's process."""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from diptych.shared.engine.llm import LLM
from diptych.shared.loading import live_weights
from diptych.shared.loading.live_weights import specs_of
from diptych.shared.loading.model_path import ASSETS
from diptych.shared.parallel.weight_group import WeightSender
from diptych.shared.types import SamplingParams
from tests.planted import Bug, Bugs

TINY = ASSETS / "tiny-dense"
FLAGS: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "max_total_tokens": 1024, "check_invariants": True,
}  # fmt: skip
PROMPT = "Count from 3 to 9."
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 4, "progress": False}


def changed(tensors: dict[str, torch.Tensor], seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights with which the model answers otherwise."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (x.float() + 0.2 * x.float().std() * torch.randn(x.shape, generator=generator)).to(x.dtype)
        for name, x in tensors.items()
    }


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of other weights."""
    folder = tmp_path_factory.mktemp("weights") / "other"
    shutil.copytree(TINY, folder)
    save_file(changed(load_file(TINY / "model.safetensors")), folder / "model.safetensors")
    return folder


def answer(llm: LLM) -> str:
    return str(llm.generate(PROMPT, **GREEDY).text)


@pytest.mark.parametrize(
    "flags",
    [
        {"panel": "reference"},
        *(
            pytest.param(flags, marks=pytest.mark.full)
            for flags in ({"panel": "optimized"}, {"panel": "reference", "quantization": "int8"})
        ),
        {"panel": "reference", "tp": 2},
        pytest.param({"panel": "reference", "tp": 2, "quantization": "fp8"}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_from_a_folder_and_from_tensors(flags: dict[str, Any], other: Path) -> None:
    """The text is that of an engine which has started with these weights, and then that of the first."""
    expected = answer(LLM(str(other), **FLAGS, **flags))
    llm = LLM("tiny-dense", **FLAGS, **flags)
    before = answer(llm)
    assert before != expected
    with llm.weight_updates() as weights:
        assert weights.from_folder(str(other)) == 1
    output = llm.generate(PROMPT, **GREEDY)
    assert (output.text, output.weight_version) == (expected, 1)
    with llm.weight_updates() as weights:
        assert weights.from_tensors(load_file(TINY / "model.safetensors")) == 2
    assert answer(llm) == before


@pytest.mark.parametrize("panel", ["reference", pytest.param("optimized", marks=pytest.mark.full)])
@pytest.mark.parametrize("num_steps", [1, pytest.param(4, marks=pytest.mark.full)])
def test_running_requests_go_on_with_the_new_weights(panel: str, num_steps: int, other: Path) -> None:
    llm = LLM("tiny-dense", panel=panel, **FLAGS)
    (running,) = llm.submit(PROMPT, SamplingParams(max_new_tokens=12, temperature=0.0))
    for _ in range(num_steps):
        llm.step()
    with llm.weight_updates() as weights:
        weights.from_folder(str(other))
    assert not list(llm.assembly.parts.tree_cache.nodes())
    assert llm.stats().num_used_tokens == 0
    so_far = running.output_ids[:]
    assert running.weight_version == 0
    while llm.step():
        pass
    fresh = LLM(str(other), panel=panel, **FLAGS)
    prompt = fresh.tokenizer.encode(PROMPT) + so_far
    rest = fresh.generate(prompt, **GREEDY | {"max_tokens": 12 - len(so_far)})
    assert running.output_ids == so_far + rest.output_ids
    assert running.whole().weight_version == 1


def refused(tensors: dict[str, torch.Tensor], how: str) -> tuple[dict[str, torch.Tensor], str]:
    """An update whose last tensor is wrong, and what the refusal says."""
    name = list(tensors)[-1]
    wrong: dict[str, Callable[[], dict[str, torch.Tensor]]] = {
        "unknown name": lambda: {**tensors, "model.layers.99.x.weight": torch.ones(2)},
        "wrong shape": lambda: {**tensors, name: tensors[name][..., :-1]},
        "not finite": lambda: {**tensors, name: torch.full_like(tensors[name], float("nan"))},
        "no float": lambda: {**tensors, name: tensors[name].long()},
    }
    said = {
        "unknown name": "is no weight", "wrong shape": "it must be", "not finite": "NaN or infinite",
        "no float": "type of float",
    }  # fmt: skip
    return wrong[how](), said[how]


@pytest.mark.parametrize("how", ["unknown name", "wrong shape", "not finite", "no float"])
@pytest.mark.parametrize(
    "flags",
    [
        {"panel": "reference"},
        *(pytest.param(each, marks=pytest.mark.full) for each in ({"panel": "optimized"}, {"tp": 2})),
    ],
    ids=str,
)
def test_a_refused_update_changes_nothing(how: str, flags: dict[str, Any]) -> None:
    llm = LLM("tiny-dense", **FLAGS, **flags)
    before = answer(llm)
    num_cached = llm.stats().num_evictable_tokens
    tensors, said = refused(changed(load_file(TINY / "model.safetensors")), how)
    with llm.weight_updates() as weights, pytest.raises(ValueError, match=said):
        weights.from_tensors(tensors)
    assert llm.stats().num_evictable_tokens == num_cached
    assert answer(llm) == before
    assert llm.assembly.weights.version == 0


def test_a_folder_that_does_not_fit_changes_nothing(other: Path, tmp_path: Path) -> None:
    llm = LLM("tiny-dense", panel="reference", tp=2, **FLAGS)
    before = answer(llm)
    tensors = changed(load_file(TINY / "model.safetensors"))
    last = list(tensors)[-1]
    for name, bad in (("missing", None), ("nan", torch.full_like(tensors[last], float("nan")))):
        folder = tmp_path / name
        shutil.copytree(other, folder)
        wrong = {**tensors, last: bad} if bad is not None else {n: x for n, x in tensors.items() if n != last}
        save_file(wrong, folder / "model.safetensors")
        with llm.weight_updates() as weights, pytest.raises(ValueError, match=r"missing|NaN|rank 1"):
            weights.from_folder(str(folder))
    with llm.weight_updates() as weights, pytest.raises(ValueError, match="other sizes"):
        weights.from_folder(str(ASSETS / "tiny-moe"))
    assert answer(llm) == before


@pytest.mark.parametrize(
    "flags",
    [pytest.param({"panel": "optimized"}, marks=pytest.mark.full), {"panel": "reference", "tp": 2}],
    ids=str,
)
def test_from_a_trainer(flags: dict[str, Any], other: Path) -> None:
    """A thread stands for the trainer's process. It also gets refusals."""
    llm = LLM("tiny-dense", **FLAGS, **flags)
    tensors = load_file(other / "model.safetensors")
    names = list(tensors)
    with llm.weight_updates() as weights:
        sender = WeightSender(weights.invite(), seconds=30)
        problems: list[str] = []

        def send(these: dict[str, torch.Tensor]) -> None:
            try:
                sender.send(these)
            except ValueError as error:
                problems.append(str(error))

        def update(these: dict[str, torch.Tensor]) -> None:
            thread = threading.Thread(target=send, args=(these,))
            thread.start()
            try:
                weights.from_group(specs_of(these))
            finally:
                thread.join()

        with pytest.raises(ValueError, match="is no weight"):
            update({"model.nothing.weight": torch.ones(3)})
        with pytest.raises(ValueError, match="NaN or infinite"):
            update({names[-1]: torch.full_like(tensors[names[-1]], float("nan"))})
        assert ["is no weight" in problems[0], "NaN or infinite" in problems[1]] == [True, True]
        half = len(names) // 2
        update({name: tensors[name] for name in names[:half]})
        update({name: tensors[name] for name in names[half:]})  # in two parts
        assert llm.assembly.weights.version == 2
    assert answer(llm) == answer(LLM(str(other), **FLAGS, **flags))


def test_a_trainer_that_does_not_send(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM("tiny-dense", panel="reference", **FLAGS)
    before = answer(llm)
    with llm.weight_updates() as weights:
        with pytest.raises(ValueError, match="no trainer is invited"):
            weights.from_group([])
        monkeypatch.setattr("diptych.shared.parallel.weight_group.SECONDS", 1.0)
        weights.invite()
        assert llm.assembly.weights.group is not None
        llm.assembly.weights.group.limit /= 60
        with pytest.raises(ValueError, match="no weight has changed"):
            weights.from_group(specs_of({"model.norm.weight": torch.ones(llm.model_config.hidden_size)}))
    assert answer(llm) == before


@pytest.mark.parametrize(
    "flags",
    [
        {"dp": 2},
        *(pytest.param(each, marks=pytest.mark.full) for each in ({"pp": 2}, {"disaggregation": True})),
    ],
    ids=str,
)
def test_engines_that_take_no_new_weights(flags: dict[str, Any], other: Path) -> None:
    plain = {name: value for name, value in FLAGS.items() if name != "check_invariants"}
    llm = LLM("tiny-dense", panel="reference", **plain, **flags)
    with (
        llm.weight_updates() as weights,
        pytest.raises(ValueError, match=f"do not work with {next(iter(flags))}"),
    ):
        weights.from_folder(str(other))


def test_one_weight_can_be_read() -> None:
    llm = LLM("tiny-dense", panel="optimized", **FLAGS)
    stored = load_file(TINY / "model.safetensors")
    for name in ("model.layers.0.self_attn.k_proj.weight", "model.norm.weight"):
        assert torch.equal(llm.assembly.weights.get(name), stored[name].float())
    with pytest.raises(ValueError, match="is no weight"):
        llm.assembly.weights.get("model.layers.0.self_attn.qkv_proj.weight")


PLANTED = Bugs("weight updates", "live_weights", "is_all_or_nothing")
for _name, _words in {
    "copied before all are checked": (
        "held[name] = tensor if self.ranks.size == 1 else tensor.clone()",
        "targets[name].data.copy_(tensor)",
    ),
    "shapes are not checked before the first copy": (
        "elif tuple(part.shape) != expected[part.name]:",
        "elif len(part.shape) != len(expected[part.name]):",
    ),
    "every second one stays as it was": (
        "        for name, tensor in weights:\n            for to",
        "        weights = [*weights][::2]\n        for name, tensor in weights:\n            for to",
    ),
    "an update is not counted": ("self.version += 1", "pass"),
}.items():
    PLANTED.words(_name, "shared.loading.live_weights", ("shared.loading.live_weights", *_words))


def is_all_or_nothing(live_weights: Any) -> bool:
    """Whether an update that is refused at its last tensor changes nothing, and the next one all."""
    llm = LLM("tiny-dense", panel="reference", **FLAGS)
    live = live_weights.LiveWeights(
        llm.assembly.model, llm.model_config, llm.assembly.weights.device, None, llm.assembly.tp
    )
    tensors = {name: x.float() for name, x in load_file(TINY / "model.safetensors").items()}
    before = {name: live.get(name) for name in tensors}
    new = changed(tensors)
    last = list(new)[-1]
    for bad in (torch.full_like(new[last], float("inf")), new[last][..., :-1]):
        wrong = {**new, last: bad}
        with contextlib.suppress(Exception):  # a planted bug may raise another
            live.check(live_weights.specs_of(wrong))
            live.update(zip(live_weights.specs_of(wrong), wrong.values()))
            return False
        if not all(torch.equal(live.get(name), x) for name, x in before.items()):
            return False
    try:
        live.check(live_weights.specs_of({last: new[last][..., :-1]}))
        return False
    except ValueError:
        live.update(zip(live_weights.specs_of(new), new.values()))
    return live.version == 1 and all(torch.equal(live.get(name), x) for name, x in new.items())


@PLANTED.found_by(honest=True)
def test_half_updated_weights_are_noticed(bug: Bug) -> dict[str, str]:
    return {} if is_all_or_nothing(bug.planted or live_weights) else {"is_all_or_nothing": ""}
