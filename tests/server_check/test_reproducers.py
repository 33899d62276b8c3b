"""The recorded reproducers are those of the module, each was seen, and a right server shows none."""

from __future__ import annotations

import json
from typing import Any

from tests.server_check.reproducers import FILE, SERVERS, Answer, report, whole

RIGHT: Any = {"choices": [{"message": {"content": "12 + 30 = 42"}}], "usage": {"prompt_tokens": 22}}


def test_every_recorded_reproducer_was_seen() -> None:
    found = json.loads(FILE.read_text(encoding="utf-8"))
    for server, reproducers in SERVERS.items():
        rows = found[server]["rows"]
        assert found[server]["version"]
        assert all(row["seen"] for row in rows)
        texts = [(each.name, each.request, each.expected, each.got) for each in reproducers]
        assert [tuple(row[name] for name in ("name", "request", "expected", "got")) for row in rows] == texts
        assert len(texts) >= 7


def test_a_refusal_is_no_bug_and_a_report_has_a_command_for_each_request() -> None:
    refusal = Answer(400, {"error": {"message": "no"}}, "[DONE]")
    for each in [each for reproducers in SERVERS.values() for each in reproducers]:
        bodies = [whole(body, "m") for body in each.bodies]
        answers = [refusal] * len(bodies)
        assert not each.is_seen(answers), each.name
        text = report(each, bodies, answers, "server 1.0")
        assert text.startswith(f"## {each.name}: NOT SEEN\n")
        assert text.count("curl -s URL/v1/chat/completions") == len(bodies)
    assert Answer(200, RIGHT, "").short == "status 200, 22 prompt tokens, '12 + 30 = 42'"
