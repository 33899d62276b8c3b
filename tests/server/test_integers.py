"""Integers beyond what the engine's messages, torch and the computer can hold, wherever a body has one."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.running import RunningServer
from tests.server.test_faults import assert_whole
from tests.server.test_field_table import BODIES

NAMED = {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]]}
MORE: list[tuple[str, dict[str, Any]]] = [
    ("/update_weights_from_distributed", NAMED),
    ("/update_weights_from_tensor", {**NAMED, "data": ["AAAAAA=="]}),
    ("/update_weights_from_tensor", {**NAMED, "cuda_handles": [{"num_bytes": 4}]}),
    ("/start_profile", {}),
    ("/v1/completions", {"prompt": [5]}),
    ("/v1/completions", {"prompt": "a", "logit_bias": {"5": 1}}),
    ("/generate", {"input_ids": [[5]]}),
    ("/generate", {"input_embeds": [[0.5]]}),
    ("/tokenize", {"messages": [{"role": "user", "content": "a"}]}),
]
SHORT = {
    "/v1/chat/completions": {"max_tokens": 1},
    "/v1/completions": {"max_tokens": 1},
    "/v1/responses": {"max_output_tokens": 1},
    "/generate": {"sampling_params": {"max_new_tokens": 1, "stop_regex": "."}},
}
"""Answers of one token, or one character."""
LARGE = 10**30
OTHERS = (-LARGE, 2**63, -(2**63) - 1, 2**64, 10**400)
Path = tuple[Any, ...]


def integers(schema: Any, definitions: dict[str, Any], depth: int = 0) -> Iterator[tuple[Path, Any]]:
    """Places of integers in the values of a JSON schema: the path, where 0 is an entry of a list and "5" a
    name of an object that takes any."""
    if "$ref" in schema:
        schema = definitions[schema["$ref"].rpartition("/")[2]]
    for branch in schema.get("anyOf", ()):
        yield from integers(branch, definitions, depth)
    kind = schema.get("type")
    if kind in ("integer", "number") or not schema:
        yield (), None
    if depth == 4:
        return
    for name, child in schema.get("properties", {}).items():
        for path, _ in integers(child, definitions, depth + 1):
            yield (name, *path), None
    more = schema.get("additionalProperties")
    if more:
        for path, _ in integers({} if more is True else more, definitions, depth + 1):
            yield ("5", *path), None
    if kind == "array":
        for path, _ in integers(schema.get("items", {}), definitions, depth + 1):
            yield (0, *path), None


def with_value(body: Any, path: Path, value: Any) -> Any:
    """The body with a value at a place, which is made."""
    if not path:
        return value
    step, rest = path[0], path[1:]
    if step == 0:
        return [with_value(body[0] if isinstance(body, list) and body else body, rest, value)]
    body = body if isinstance(body, dict) else {}
    return {**body, step: with_value(body.get(step), rest, value)}


def cases(url: str) -> list[tuple[str, dict[str, Any], Path]]:
    schema = httpx.get(f"{url}/openapi.json").json()
    found: list[tuple[str, dict[str, Any], Path]] = []
    for route, body in [*BODIES.values(), *MORE]:
        is_new = all(route != other for other, _, _ in found)
        shape = schema["paths"][route]["post"]["requestBody"]["content"]["application/json"]["schema"]
        places = {path for path, _ in integers(shape, schema["components"]["schemas"])}
        full = {**copy.deepcopy(body), **SHORT.get(route, {})}
        found += [
            (route, full, path) for path in sorted(places, key=repr) if is_new or not path or path[0] in body
        ]
    return found


@pytest.mark.parametrize(
    "values", [(LARGE,), pytest.param(OTHERS, marks=pytest.mark.full)], ids=["one", "many"]
)
def test_no_integer_is_too_large_for_an_answer(server: RunningServer, values: tuple[int, ...]) -> None:
    asked = cases(server.url)
    assert len(asked) > 120
    with httpx.Client(timeout=60) as client:
        for route, body, path in asked:
            for value in values:
                data = json.dumps(with_value(body, path, value))
                answer = client.post(
                    server.url + route, content=data, headers={"Content-Type": "application/json"}
                )
                assert answer.status_code < 500, (route, path, answer.text[:300])
    assert_whole(server)


def test_token_ids_as_names_have_a_length(server: RunningServer) -> None:
    body = {"prompt": "a", "max_tokens": 1, "logit_bias": {"9" * 5000: 1}}
    assert httpx.post(f"{server.url}/v1/completions", json=body).status_code == 400
