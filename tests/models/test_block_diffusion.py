"""Block diffusion against a plain loop over transformers' model: all tokens anew in each pass, no KV."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from model_harness import random_hf_model
from transformers import PreTrainedModel

from reference.block_diffusion import BlockDiffusion, DiffusionParams, fill_in
from shared.conformance.configs import CONFIGS
from shared.engine.llm import LLM

MASK = 330


def plain_loop(
    model: PreTrainedModel, prompt: list[int], num_new: int, params: DiffusionParams
) -> tuple[list[int], int]:
    """The same tokens by its definition, and the number of times that masks were filled in."""
    size = params.block_len
    num_blocks = -(-(len(prompt) + num_new) // size)
    ids = [*prompt, *[params.mask_id] * (num_blocks * size - len(prompt))]
    num_rounds = 0
    for start in range(len(prompt) // size * size, len(ids), size):
        block = torch.arange(start + size) // size
        mask = torch.where(block[None, :] <= block[:, None], 0.0, -torch.inf)[None, None]
        while params.mask_id in ids[start : start + size]:
            with torch.inference_mode():
                logits = model(torch.tensor([ids[: start + size]]), attention_mask=mask).logits[0, start:]
            logits = logits.clone()
            logits[:, params.mask_id] = -torch.inf
            probs, tokens = logits.softmax(-1).max(-1)
            unknown = [i for i in range(size) if ids[start + i] == params.mask_id]
            best = max(unknown, key=lambda i: float(probs[i]))
            for i in unknown:
                if i == best or probs[i] > params.threshold:
                    ids[start + i] = int(tokens[i])
            num_rounds += 1
    return ids[len(prompt) : len(prompt) + num_new], num_rounds


@pytest.mark.parametrize(
    ("block_len", "num_prompt", "threshold", "page_size"),
    [(4, 9, 0.5, 1), (4, 8, 0.95, 4), pytest.param(8, 3, 0.3, 16, marks=pytest.mark.full)],
)
def test_tokens_are_those_of_a_plain_loop(
    tmp_path: Path, block_len: int, num_prompt: int, threshold: float, page_size: int
) -> None:
    model = random_hf_model(CONFIGS["llama-llama3"])
    model.save_pretrained(tmp_path)
    llm = LLM(str(tmp_path), panel="reference", device="cpu", max_total_tokens=64, page_size=page_size)
    params = DiffusionParams(MASK, block_len, threshold)
    prompt = [(7 * i) % 300 for i in range(num_prompt)]
    diffusion = BlockDiffusion(llm.assembly.parts, params)
    tokens, num_rounds = plain_loop(model, prompt, 14, params)
    assert diffusion.generate(prompt, 14) == tokens
    num_blocks = -(-(num_prompt + 14) // block_len) - num_prompt // block_len
    assert diffusion.num_passes == num_rounds + num_blocks + (num_prompt >= block_len)
    assert llm.assembly.parts.allocator.available_size() == llm.assembly.parts.allocator.size
    eos = tokens[5]
    diffusion.params = DiffusionParams(MASK, block_len, threshold, frozenset([eos]))
    assert diffusion.generate(prompt, 14) == tokens[: tokens.index(eos) + 1]
    with pytest.raises(ValueError, match="there is no room for"):
        diffusion.generate(prompt, 100)


class NoLastPass(BlockDiffusion):
    """The KV of a block is that of its last masks."""

    def _forward(self, row, slots, ids, start, end):
        is_last = start >= 8 and not (ids[start:end] == MASK).any()
        return None if is_last else super()._forward(row, slots, ids, start, end)


class CausalInside(BlockDiffusion):
    """A token of a block does not see those behind it."""

    def _forward(self, row, slots, ids, start, end):
        params, self.params = self.params, DiffusionParams(MASK, 1)
        try:
            return super()._forward(row, slots, ids, start, end)
        finally:
            self.params = params


@pytest.mark.parametrize("mutant", [NoLastPass, CausalInside])
def test_planted_bugs_are_found(tmp_path: Path, mutant: type[BlockDiffusion]) -> None:
    model = random_hf_model(CONFIGS["llama-llama3"])
    model.save_pretrained(tmp_path)
    llm = LLM(str(tmp_path), panel="reference", device="cpu", max_total_tokens=64)
    params, prompt = DiffusionParams(MASK, 4, 0.5), [(7 * i) % 300 for i in range(9)]
    tokens, _ = plain_loop(model, prompt, 14, params)
    assert mutant(llm.assembly.parts, params).generate(prompt, 14) != tokens


def test_at_least_one_token_is_filled_in_and_known_ones_stay() -> None:
    params = DiffusionParams(mask_id=3, block_len=4, threshold=0.95)
    logits = torch.tensor([[9.0, 0, 0, 99], [0, 9, 0, 0], [0, 0.1, 0, 0], [0, 0, 0.2, 0]])
    mask = torch.tensor([3, 0, 3, 3])
    assert fill_in(mask, logits, params).tolist() == [0, 0, 3, 3]
    assert fill_in(torch.tensor([0, 0, 3, 3]), logits, params).tolist() == [0, 0, 3, 2]
