from itertools import islice
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from diptych.shared.tools.corpus.corpus import training_chats
from diptych.shared.tools.training.packing import (
    USER_WEIGHT,
    Batch,
    ChatEncoder,
    Document,
    PackedBatches,
    pack,
)
from diptych.shared.tools.training.train import document_mask

FOLDER = Path(__file__).parents[2] / "shared" / "assets" / "tiny-dense"
TOKENIZER_JSON = (FOLDER / "tokenizer.json").read_text()


@pytest.fixture(scope="module")
def batch() -> Batch:
    return PackedBatches(TOKENIZER_JSON, seed=3, num_batches=4, num_rows=8, row_len=512)[1]


def test_documents_are_what_the_chat_template_renders() -> None:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    encoder = ChatEncoder(Tokenizer.from_str(TOKENIZER_JSON))
    chats = list(islice(training_chats("packing"), 200))
    for chat, document in zip(chats, encoder.encode(chats), strict=True):
        rendered = tokenizer.apply_chat_template(chat, tokenize=False) + "<|endoftext|>"
        assert document.token_ids == tokenizer.encode(rendered)


def test_full_weight_is_on_what_the_assistant_says() -> None:
    tokenizer = Tokenizer.from_str(TOKENIZER_JSON)
    chat = [{"role": "user", "content": "What is 1 + 2?"}, {"role": "assistant", "content": "1 + 2 = 3"}]
    document = ChatEncoder(tokenizer).encode([chat])[0]
    full = [token for token, weight in zip(*document, strict=True) if weight == 1.0]
    assert tokenizer.decode(full, skip_special_tokens=False) == "1 + 2 = 3<|im_end|>"
    assert set(document.weights) == {USER_WEIGHT, 1.0}


def test_batches_depend_on_seed_and_index_alone(batch: Batch) -> None:
    again = PackedBatches(TOKENIZER_JSON, seed=3, num_batches=4, num_rows=8, row_len=512)
    assert all(torch.equal(a, b) for a, b in zip(again[1], batch, strict=True))
    assert not torch.equal(again[2].input_ids, batch.input_ids)


def test_rows_are_nearly_full(batch: Batch) -> None:
    # Best fit leaves only what the shortest chats cannot fill; larger batches leave less.
    assert (batch.document_ids >= 0).float().mean() > 0.95


def test_targets_are_the_next_tokens_of_the_same_chat(batch: Batch) -> None:
    weighted = batch.weights[:, :-1] > 0
    assert torch.equal(batch.target_ids[:, :-1][weighted], batch.input_ids[:, 1:][weighted])
    same_chat = batch.document_ids[:, :-1] == batch.document_ids[:, 1:]
    assert same_chat[weighted].all()
    assert (batch.weights[batch.document_ids < 0] == 0).all()


def test_positions_start_at_zero_in_each_chat(batch: Batch) -> None:
    starts = batch.document_ids[:, 1:] != batch.document_ids[:, :-1]
    assert (batch.positions[:, 0] == 0).all()
    assert (batch.positions[:, 1:][starts] == 0).all()
    inside = ~starts & (batch.document_ids[:, 1:] >= 0)
    steps = batch.positions[:, 1:] - batch.positions[:, :-1]
    assert (steps[inside] == 1).all()


def test_mask_keeps_chats_apart() -> None:
    mask = document_mask(torch.tensor([[0, 0, 1, 1, -1]]))
    expected = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 1]]
    assert mask.shape == (1, 1, 5, 5)
    assert mask[0, 0].int().tolist() == expected


def test_what_fits_nowhere_is_dropped() -> None:
    documents = [Document(list(range(size)), [1.0] * size) for size in (6, 5, 4, 3)]
    batch = pack(documents, num_rows=1, row_len=10, pad_id=0)
    assert batch.document_ids[0].tolist() == [0] * 6 + [1] * 4
