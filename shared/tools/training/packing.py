"""Training batches: chats as token ids, packed into rows of equal length, made ahead by worker processes."""

import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer
from torch.utils.data import DataLoader, Dataset

from diptych.shared.tools.corpus.corpus import training_chats
from diptych.shared.tools.corpus.exchange import Message
from diptych.shared.tools.training.learn_tokenizer import END_OF_TEXT, IM_END, IM_START

# What the assistant does not say is learned too, gently: the user's words are random and cannot be predicted.
USER_WEIGHT = 0.1
_CHATS_AT_ONCE = 64


class Document(NamedTuple):
    """One chat, rendered as the chat template does, and END_OF_TEXT.

    `weights[i]` counts the loss on predicting token i.
    """

    token_ids: list[int]
    weights: list[float]


class Batch(NamedTuple):
    """Packed rows, each tensor of shape [num_rows, row_len].

    `document_ids` tells a row's chats apart (-1 is padding); positions start at 0 in each.
    `target_ids[:, t]` is the token after position t, with its loss weight, 0 for a chat's last token.
    """

    input_ids: torch.Tensor
    target_ids: torch.Tensor
    weights: torch.Tensor
    positions: torch.Tensor
    document_ids: torch.Tensor


class ChatEncoder:
    """Turns chats into documents, message by message; the special tokens between messages make that exact."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._start = tokenizer.token_to_id(IM_START)
        self._end = tokenizer.token_to_id(IM_END)
        self.end_of_text = tokenizer.token_to_id(END_OF_TEXT)
        self._newline = tokenizer.encode("\n").ids
        self._roles = {role: tokenizer.encode(f"{role}\n").ids for role in ("system", "user", "assistant")}

    def encode(self, chats: list[list[Message]]) -> list[Document]:
        contents = self._tokenizer.encode_batch([message["content"] for chat in chats for message in chat])
        next_content = iter(contents)
        return [self._document(chat, next_content) for chat in chats]

    def _document(self, chat: list[Message], contents: Iterator[Any]) -> Document:
        token_ids: list[int] = []
        weights: list[float] = []
        for message in chat:
            prefix = [self._start, *self._roles[message["role"]]]
            said = [*next(contents).ids, self._end]
            said_weight = 1.0 if message["role"] == "assistant" else USER_WEIGHT
            token_ids += prefix + said + self._newline
            weights += (
                [USER_WEIGHT] * len(prefix) + [said_weight] * len(said) + [USER_WEIGHT] * len(self._newline)
            )
        return Document([*token_ids, self.end_of_text], [*weights, USER_WEIGHT])


def pack(documents: list[Document], num_rows: int, row_len: int, pad_id: int) -> Batch:
    """Best-fit decreasing: each document, longest first, goes where it leaves the least room.

    What fits nowhere is dropped.
    """
    rows: list[list[Document]] = [[] for _ in range(num_rows)]
    room = [row_len] * num_rows
    for document in sorted(documents, key=lambda document: -len(document.token_ids)):
        size = len(document.token_ids)
        fitting = [row for row in range(num_rows) if room[row] >= size]
        if fitting:
            row = min(fitting, key=room.__getitem__)
            rows[row].append(document)
            room[row] -= size
    batch = Batch(
        input_ids=torch.full((num_rows, row_len), pad_id),
        target_ids=torch.full((num_rows, row_len), pad_id),
        weights=torch.zeros(num_rows, row_len),
        positions=torch.zeros(num_rows, row_len, dtype=torch.int64),
        document_ids=torch.full((num_rows, row_len), -1),
    )
    for row, row_documents in enumerate(rows):
        start = 0
        for index, document in enumerate(row_documents):
            end = start + len(document.token_ids)
            batch.input_ids[row, start:end] = torch.tensor(document.token_ids)
            batch.target_ids[row, start : end - 1] = torch.tensor(document.token_ids[1:])
            batch.weights[row, start : end - 1] = torch.tensor(document.weights[1:])
            batch.positions[row, start:end] = torch.arange(end - start)
            batch.document_ids[row, start:end] = index
            start = end
    return batch


class PackedBatches(Dataset[Any]):
    """Batch i depends on (seed, i) alone, whichever worker makes it."""

    def __init__(
        self, tokenizer_json: str, seed: int | str, num_batches: int, num_rows: int, row_len: int
    ) -> None:
        self.tokenizer_json, self.seed = tokenizer_json, seed
        self.num_batches, self.num_rows, self.row_len = num_batches, num_rows, row_len
        self._encoder: ChatEncoder | None = None

    def __len__(self) -> int:
        return self.num_batches

    def __getitem__(self, index: int) -> Batch:
        if index >= self.num_batches:
            raise IndexError(f"batch {index} of {self.num_batches}")
        if self._encoder is None:
            os.environ["TOKENIZERS_PARALLELISM"] = "false"
            self._encoder = ChatEncoder(Tokenizer.from_str(self.tokenizer_json))
        chats = training_chats(f"{self.seed}/{index}")
        documents: list[Document] = []
        wanted = self.num_rows * self.row_len
        while wanted > 0:
            for document in self._encoder.encode([next(chats) for _ in range(_CHATS_AT_ONCE)]):
                if wanted > 0 and len(document.token_ids) <= self.row_len:
                    documents.append(document)
                    wanted -= len(document.token_ids)
        return pack(documents, self.num_rows, self.row_len, self._encoder.end_of_text)


def batch_loader(dataset: PackedBatches, num_workers: int) -> DataLoader[Any]:
    """Batches in order, made ahead by `num_workers` processes (0: made here)."""
    return DataLoader(
        dataset,
        batch_size=None,
        num_workers=num_workers,
        prefetch_factor=8 if num_workers else None,
        pin_memory=torch.cuda.is_available(),
    )
