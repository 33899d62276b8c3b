"""llama.cpp's server, of the package xllamacpp: python -m tests.real.llama_cpp FILE PORT runs it until its
input ends."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tests.real.fetch import SITE

NUM_TOP = 40
"""Tokens of which the server reports log-probabilities."""
NUM_SCORED = 30
"""Positions of a text that are scored, evenly apart: each is a request of its own."""


@contextmanager
def running(file: Path) -> Iterator[str]:
    """The URL of a server that serves the file. Attention is computed in float32."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SITE), *sys.path])}
    command = [sys.executable, "-m", "tests.real.llama_cpp", str(file), str(port)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
    ) as process:
        assert process.stdout is not None
        try:
            if not any(b"ready" in line for line in process.stdout):
                raise RuntimeError("llama.cpp's server did not start")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def post(url: str, body: dict[str, Any]) -> Any:
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode())) as answer:
        return json.load(answer)


def scored(url: str, expected: torch.Tensor, ids: list[int]) -> dict[str, float]:
    """As `measure.compared`, of some positions: the KL divergence is that of the server's likeliest tokens
    and of all others as one, which is less than that of all tokens."""
    step = max(1, (len(ids) - 1) // NUM_SCORED)
    kl, best = [], []
    for position in range(step, len(ids), step):
        body = {"prompt": ids[:position], "temperature": 0, "n_predict": 1, "n_probs": NUM_TOP}
        answer = post(f"{url}/completion", body)
        if not answer.get("completion_probabilities"):  # the token is a part of a character
            continue
        top = answer["completion_probabilities"][0]["top_logprobs"]
        found = torch.tensor([each["logprob"] for each in top], dtype=torch.float64).exp()
        known = expected[position - 1].double().exp()
        p = torch.cat([known[[each["id"] for each in top]], torch.zeros(1, dtype=torch.float64)])
        q = torch.cat([found, torch.zeros(1, dtype=torch.float64)])
        p[-1], q[-1] = ((1 - each.sum()).clamp(min=1e-12) for each in (p, q))
        kl.append(float((p * (p / q).log()).sum()))
        best.append(int(known.argmax()) == top[0]["id"])
    return {
        "kl": sum(kl) / len(kl), "largest_kl": max(kl), "same_best": sum(best) / len(best),
        "num_tokens": len(kl),
    }  # fmt: skip


def serve(file: str, port: int) -> None:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.port, params.n_parallel, params.n_ctx = file, port, 4, 8192
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    server = xllamacpp.Server(params)
    print("ready", flush=True)
    sys.stdin.read()
    del server


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
