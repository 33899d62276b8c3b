"""LoRA adapters over HTTP: OpenAI's client names them as models; loading and unloading while serving."""

from __future__ import annotations

import json
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from diptych.shared.config import read_config
from diptych.shared.engine.llm import LLM
from diptych.shared.loading.lora_adapter import adaptable_modules
from diptych.shared.loading.model_path import ASSETS
from tests.server.running import RunningServer, openai_client, serving

PROMPT = "Mara has a red kite."
ASK: dict[str, Any] = {"prompt": PROMPT, "temperature": 0, "max_tokens": 8}


def write_adapter(folder: Path, seed: int) -> str:
    folder.mkdir()
    config = {"peft_type": "LORA", "lora_alpha": 4, "r": 2}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    shapes = adaptable_modules(read_config(ASSETS / "tiny-dense"))
    tensors = {}
    for name, (num_out, num_in) in shapes.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(2, num_in, generator=generator) / 16
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(num_out, 2, generator=generator) / 2
    save_file(tensors, folder / "adapter_model.safetensors")
    return str(folder)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("adapters")
    return {name: write_adapter(folder / name, seed) for seed, name in enumerate(("first", "second"))}


@pytest.fixture(scope="module")
def lora_server(paths: dict[str, str]) -> Iterator[RunningServer]:
    root = str(Path(paths["second"]).parent)
    flags = ("--lora-paths", f"first={paths['first']}", "--lora-root", root, "--max-total-tokens", "4096")
    with serving(*flags) as server:
        yield server


def test_adapters_are_models(lora_server: RunningServer, paths: dict[str, str]) -> None:
    import openai

    client = openai_client(lora_server)
    llm = LLM("tiny-dense", lora_paths=paths, max_total_tokens=1024)
    offline = {
        name: llm.generate(PROMPT, temperature=0, max_tokens=8, lora=name, progress=False).text
        for name in (None, "first", "second")
    }
    assert len(set(offline.values())) == 3
    assert [model.id for model in client.models.list()] == ["tiny-dense", "first"]
    for name, model in ((None, "tiny-dense"), ("first", "first")):
        answer = client.completions.create(model=model, **ASK)
        assert (answer.choices[0].text, answer.model) == (offline[name], model)
    text = "".join(
        chunk.choices[0].text for chunk in client.completions.create(model="first", stream=True, **ASK)
    )
    assert text == offline["first"]

    with pytest.raises(openai.NotFoundError, match="'second' is not served; 'tiny-dense', 'first' are"):
        client.completions.create(model="second", **ASK)
    answer = lora_server.post("/load_lora_adapter", {"lora_name": "second", "lora_path": paths["second"]})
    assert answer == {"success": True, "loaded_adapters": ["first", "second"]}
    assert client.completions.create(model="second", **ASK).choices[0].text == offline["second"]
    native = {
        "text": PROMPT,
        "lora_path": "second",
        "sampling_params": {"temperature": 0, "max_new_tokens": 8},
    }
    assert lora_server.post("/generate", native)["text"] == offline["second"]

    lora_server.post("/unload_lora_adapter", {"lora_name": "second"})
    with pytest.raises(openai.NotFoundError, match="'second' is not served"):
        client.chat.completions.create(model="second", messages=[{"role": "user", "content": "Hi"}])
    for path, body in (
        ("/unload_lora_adapter", {"lora_name": "second"}),
        ("/load_lora_adapter", {"lora_name": "third", "lora_path": "/nowhere"}),
        ("/load_lora_adapter", {"lora_name": "third", "lora_path": "a" * 5000}),
        ("/load_lora_adapter", {"lora_name": "third", "lora_path": "~nouser/adapter"}),
    ):
        with pytest.raises(urllib.error.HTTPError, match="400"):
            lora_server.post(path, body)
    assert client.completions.create(model="first", **ASK).choices[0].text == offline["first"]
