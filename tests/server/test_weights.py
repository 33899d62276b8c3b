"""New weights over HTTP: for administrators, all or nothing, and answers carry their version."""

from __future__ import annotations

import base64
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file

from diptych.shared.engine.llm import LLM
from diptych.shared.loading.live_weights import specs_of
from diptych.shared.loading.model_path import ASSETS
from diptych.shared.parallel.tensor_frames import bytes_of
from diptych.shared.parallel.weight_group import WeightSender
from tests.engine.test_weight_updates import changed
from tests.server.running import RunningServer, serving

TINY = ASSETS / "tiny-dense"
ASK = {"text": "Count from 3 to 9.", "sampling_params": {"temperature": 0, "max_new_tokens": 12}}
ADMIN = {"Authorization": "Bearer admin"}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    shutil.copytree(TINY, folder / "other")
    save_file(changed(load_file(TINY / "model.safetensors")), folder / "other" / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[RunningServer]:
    flags = ("--max-total-tokens", "4096", "--max-body-mib", "64", "--weights-root", str(root))
    with serving(*flags, "--api-key", "user", "--admin-key", "admin") as server:
        yield server


def post(
    server: RunningServer, path: str, body: dict[str, Any], status: int = 200, key: str = "admin"
) -> Any:
    headers = {"Authorization": f"Bearer {key}"}
    answer = httpx.post(server.url + path, json=body, headers=headers, timeout=120)
    assert answer.status_code == status, answer.text
    return answer.json()


def ask(server: RunningServer) -> tuple[str, int]:
    answer = post(server, "/generate", ASK, key="user")
    return answer["text"], answer["meta_info"]["weight_version"]


def announced(tensors: dict[str, Any]) -> dict[str, Any]:
    specs = specs_of(tensors)
    return {
        "names": [spec.name for spec in specs],
        "dtypes": [spec.dtype for spec in specs],
        "shapes": [list(spec.shape) for spec in specs],
    }


def test_updates(server: RunningServer, root: Path) -> None:
    llm = LLM(str(root / "other"), device="cpu", dtype="float32", max_total_tokens=1024)
    expected = llm.generate(str(ASK["text"]), temperature=0, max_tokens=12, progress=False).text
    old, version = ask(server)
    assert (version, old != expected) == (0, True)
    answer = post(server, "/update_weights_from_disk", {"model_path": "other"})
    assert answer == {"success": True, "weight_version": 1}
    assert ask(server) == (expected, 1)
    first = load_file(TINY / "model.safetensors")
    data = [base64.b64encode(bytes_of(x)).decode() for x in first.values()]
    wrong = {**announced(first), "data": data}
    wrong["shapes"][-1] = [1, 2]
    assert "it must be" in post(server, "/update_weights_from_tensor", wrong, 400)["error"]["message"]
    assert ask(server) == (expected, 1)
    post(server, "/update_weights_from_tensor", {**announced(first), "data": data})
    assert ask(server) == (old, 2)
    invitation = post(server, "/init_weights_update_group", {})
    sender = WeightSender({name: invitation[name] for name in ("store", "world_size")}, seconds=60)
    new = load_file(root / "other" / "model.safetensors")
    thread = threading.Thread(target=sender.send, args=(new,))
    thread.start()
    post(server, "/update_weights_from_distributed", announced(new))
    thread.join()
    assert ask(server) == (expected, 3)
    found = post(server, "/get_weights_by_name", {"name": "model.norm.weight"})
    assert base64.b64decode(found["data"]) == bytes_of(new["model.norm.weight"].float())
    info = httpx.get(f"{server.url}/model_info", headers=ADMIN, timeout=60).json()
    assert info["weight_version"] == 3


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/update_weights_from_disk", {"model_path": "../elsewhere"}, 400),
        ("/update_weights_from_disk", {"model_path": "missing"}, 400),
        (
            "/update_weights_from_tensor",
            {"names": ["a"], "dtypes": [], "shapes": [[1]], "data": ["AAAA"]},
            400,
        ),
        ("/update_weights_from_tensor", {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]]}, 400),
        (
            "/update_weights_from_tensor",
            {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]], "cuda_handles": [{"gpu": "x"}]},
            400,
        ),
        ("/get_weights_by_name", {"name": "nothing"}, 400),
    ],
)
def test_refusals(server: RunningServer, path: str, body: dict[str, Any], status: int) -> None:
    before = ask(server)
    post(server, path, body, status)
    post(server, path, body, 403, key="user")
    assert ask(server) == before
