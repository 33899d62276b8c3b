"""Embeddings through OpenAI's client, and the scores of a reward model, from real servers."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForSequenceClassification

from diptych.shared.engine.llm import LLM
from diptych.shared.tools.conformance.oracles.configs import CONFIGS
from tests.server.running import RunningServer, openai_client, serving

TEXTS = ["Mara has a red kite.", "Otto is a baker."]


def test_openais_client_gets_the_offline_vectors(server: RunningServer) -> None:
    import openai

    client = openai_client(server)
    llm = LLM("tiny-dense", max_total_tokens=512)
    offline = llm.embed(TEXTS)
    found = client.embeddings.create(model="tiny-dense", input=TEXTS)  # base64 on the wire
    assert [each.index for each in found.data] == [0, 1]
    for ours, theirs in zip(found.data, offline):
        assert ours.embedding == pytest.approx(theirs.embedding, abs=1e-6)
    assert found.usage.prompt_tokens == sum(each.num_prompt_tokens for each in offline)
    cut = client.embeddings.create(model="tiny-dense", input=TEXTS[0], dimensions=5, encoding_format="float")
    assert cut.data[0].embedding == pytest.approx(llm.embed(TEXTS[0], dimensions=5).embedding, abs=1e-6)
    ids = llm.tokenizer.encode(TEXTS[1])
    same = client.embeddings.create(model="tiny-dense", input=[ids, ids], encoding_format="float")
    assert same.data[0].embedding == pytest.approx(offline[1].embedding, abs=1e-5)
    for wrong in ({"dimensions": 257}, {"input": []}, {"input": [[]]}, {"input": [[5000]]}):
        with pytest.raises(openai.BadRequestError):
            client.embeddings.create(**{"model": "tiny-dense", "input": "Hi", **wrong})


@pytest.mark.full
def test_a_reward_model_is_served(tmp_path: Path) -> None:
    import openai

    config = AutoConfig.for_model(**CONFIGS["llama-biases"], num_labels=2, pad_token_id=0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    prompts = [[5, 6, 7], [8, 9]]
    offline = [each.embedding for each in LLM(str(tmp_path), max_total_tokens=64).embed(prompts)]
    with serving("--model", str(tmp_path), "--max-total-tokens", "64") as server:
        data = server.post("/classify", {"input": prompts})["data"]
        assert [each["scores"] for each in data] == [pytest.approx(each, abs=1e-6) for each in offline]
        client = openai_client(server)
        with pytest.raises(openai.BadRequestError, match="this model gives scores: POST /classify"):
            client.embeddings.create(model=str(tmp_path), input=prompts)
        with pytest.raises(openai.BadRequestError, match="reward model: it gives scores and no tokens"):
            client.completions.create(model=str(tmp_path), prompt=prompts[0])
