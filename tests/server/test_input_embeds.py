"""/generate with `input_embeds`, from a real server: the answers of the same prompt as token ids."""

from __future__ import annotations

import json
import urllib.error
from typing import Any

import pytest
import torch

from diptych.shared.engine.llm import LLM
from tests.server.running import RunningServer


def generate(server: RunningServer, **body: Any) -> dict[str, Any]:
    body["sampling_params"] = {"temperature": 0, "max_new_tokens": 12}
    return server.post("/generate", body)


def test_rows_over_http(server: RunningServer) -> None:
    llm = LLM("tiny-dense", max_total_tokens=64)
    ids = llm.chat_prompt([{"role": "user", "content": "What is 12 + 30?"}])
    rows = llm.assembly.model.embed(torch.tensor(ids)).float().tolist()
    expected = generate(server, input_ids=ids)
    for num_cached in (0, len(ids) - 1):
        found = generate(server, input_embeds=rows)
        assert found["text"] == expected["text"]
        assert found["output_ids"] == expected["output_ids"]
        assert found["meta_info"]["prompt_tokens"] == len(ids)
        assert found["meta_info"]["cached_tokens"] == num_cached
    for wrong, message in (
        ({"input_embeds": [[1.0, 2.0]]}, "hidden_size="),
        ({"input_embeds": [[1.0, 2.0], [3.0]]}, r"must be of one length, got [1, 2]"),
        ({"input_embeds": [[1e39] * len(rows[0])]}, "input_embeds[0, 0] is inf"),
        ({"input_embeds": rows, "input_ids": ids}, "give one of text, input_ids and input_embeds"),
    ):
        with pytest.raises(urllib.error.HTTPError) as refusal:
            generate(server, **wrong)
        assert refusal.value.code == 400
        assert message in json.loads(refusal.value.read())["error"]["message"]
