"""/v1/score and /v1/rerank against the offline engine."""

from __future__ import annotations

import json
import math

import pytest

from diptych.shared.engine.llm import LLM
from tests.server.running import RunningServer
from tests.server.test_public_answers import good, refused


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("tiny-dense", max_total_tokens=2048)


def test_scores_are_cosines_of_embeddings(server: RunningServer, llm: LLM) -> None:
    texts = ["Otto is a baker.", "Mara has a red kite.", "Otto bakes bread."]
    vectors = [each.embedding for each in llm.embed(texts)]
    cosines = [sum(a * b for a, b in zip(vectors[0], other)) for other in vectors]
    for names in (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")):
        answer = good(server, "/v1/score", {names[0]: texts[0], names[1]: texts})
        assert [each["score"] for each in answer["data"]] == pytest.approx(cosines, abs=1e-5)
    pairs = good(server, "/v1/score", {"text_1": texts, "text_2": texts})["data"]
    assert [each["score"] for each in pairs] == pytest.approx([1.0] * 3, abs=1e-5)
    documents = [*texts[1:], {"text": texts[0]}]
    ranked = good(server, "/v1/rerank", {"query": texts[0], "documents": documents, "top_n": 2})["results"]
    assert len(ranked) == 2
    assert (ranked[0]["index"], ranked[0]["document"]) == (2, {"text": texts[0]})
    for body, param in (
        ({"text_1": ["a", "b"], "text_2": ["a"]}, "text_1"),
        ({"query": "a", "label_token_ids": [5]}, "items"),
        ({"query": "a", "items": ["b"]}, "label_token_ids"),
        ({"query": "a", "items": [[5]], "label_token_ids": [5]}, "items"),
        ({"query": "a", "items": ["b"], "label_token_ids": [10**6]}, "label_token_ids"),
    ):
        refused(server, "/v1/score", body, param)


def test_labels_are_scored_by_their_probability(server: RunningServer, llm: LLM) -> None:
    def probabilities(text: str) -> list[float]:
        output = llm.generate(
            text, max_tokens=1, temperature=0, return_logprob=True, token_ids_logprob=(9, 30), progress=False
        )
        return [math.exp(logprob) for _, logprob in output.output_logprobs[0].asked]

    body = {"query": "Otto is", "items": [" a baker", " red"], "label_token_ids": [9, 30]}
    scores = good(server, "/v1/score", body)["scores"]
    for score, text in zip(scores, ("Otto is a baker", "Otto is red")):
        assert score == pytest.approx(probabilities(text), rel=1e-3)
    shares = good(server, "/v1/score", {**body, "apply_softmax": True})["scores"]
    for share, score in zip(shares, scores):
        assert share == pytest.approx([each / sum(score) for each in score], rel=1e-4)
    first = good(server, "/v1/score", {**body, "items": " red", "item_first": True})["scores"]
    assert first[0] == pytest.approx(probabilities(" redOtto is"), rel=1e-3)
    as_ids = {**body, "query": [5, 6], "items": [[7], [8]]}
    assert len(good(server, "/v1/score", json.loads(json.dumps(as_ids)))["scores"]) == 2
