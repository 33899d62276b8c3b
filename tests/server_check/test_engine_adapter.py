"""The adapter offers what the checks of single tokens need, and refuses what its engine does not have."""

from __future__ import annotations

import threading
from typing import Any

from diptych.shared.tools.conformance.server.capabilities import probe
from diptych.shared.tools.conformance.server.checks import Finding, Result, chosen
from diptych.shared.tools.conformance.server.client import Server
from diptych.shared.tools.conformance.server.verdict import Report
from tests.server_check.engine_adapter import serve


class Letters:
    """A tokenizer of code points."""

    def encode(self, text: str, **_: Any) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int], **_: Any) -> str:
        return bytes(ids).decode()

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        return "".join(each["content"] for each in messages)


def test_ids_are_found_without_log_probabilities() -> None:
    adapter = serve(lambda ids, temperature, most, ignore_eos: ids[:1] * most, Letters(), "letters", 0)
    threading.Thread(target=adapter.serve_forever, daemon=True).start()
    server = Server(f"http://127.0.0.1:{adapter.server_address[1]}", "letters")
    try:
        offers = probe(server, [104, 105], "hi")
        names = "token_id_prompts", "generated_ids", "chat", "completion_logprobs", "stream", "seed"
        assert [getattr(offers, name) for name in names] == [True, True, True, False, False, False]
        assert "not supported: seed" in offers.reason("seed")
        (answer,) = server.complete([104, 105], max_tokens=2, temperature=0.0, **server.id_params)
        assert (answer.token_ids, answer.text) == ((104, 104), "hh")
        held = Finding("holds", "greedy tokens")
        results = [Result(each, (held,)) for each in chosen(["seeded.greedy"])]
        report = Report({}, offers, results, 1)
        assert report.sentence.endswith(
            "single tokens alone were compared with the reference: no log-probabilities"
        )
        assert report.exit_status == 0
    finally:
        adapter.shutdown()
