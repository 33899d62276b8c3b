"""Serves an engine without a server, such as nano-vllm, for `diptych check server`: a small adapter.

python -m tests.server_check.engine_adapter MODEL 8000           # with nano-vllm installed, on a CUDA GPU
diptych check server http://127.0.0.1:8000 --model MODEL --seeded greedy
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KNOWN = {"model", "prompt", "messages", "temperature", "max_tokens", "ignore_eos", "return_token_ids"}
Generate = Callable[[list[int], float, int, bool], list[int]]


def serve(generate: Generate, tokenizer: Any, model: str, port: int) -> ThreadingHTTPServer:
    """`generate`: token ids of a prompt, temperature, max_tokens, ignore_eos -> token ids of the answer."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send(200, {"object": "list", "data": [{"id": model, "object": "model"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if unknown := sorted(set(body) - KNOWN):
                return self.send(400, {"error": {"message": f"not supported: {', '.join(unknown)}"}})
            is_chat, prompt = "messages" in body, body.get("prompt")
            if is_chat:
                said = {"tokenize": False, "add_generation_prompt": True}
                prompt = tokenizer.apply_chat_template(body["messages"], **said)
            ids = prompt
            if isinstance(prompt, str):
                ids = tokenizer.encode(prompt, add_special_tokens=not is_chat)
            most = body.get("max_tokens", 16)
            out = generate(ids, body.get("temperature", 1.0), most, body.get("ignore_eos", False))
            answer = tokenizer.decode(out, skip_special_tokens=True)
            choice = {"index": 0, "finish_reason": "length" if len(out) == most else "stop", "token_ids": out}
            choice |= {"message": {"role": "assistant", "content": answer}} if is_chat else {"text": answer}
            usage = {"prompt_tokens": len(ids), "completion_tokens": len(out)}
            return self.send(200, {"id": "1", "model": model, "choices": [choice], "usage": usage})

        def log_message(self, *_: Any) -> None:
            """Requests are not printed."""

        def send(self, status: int, body: Any) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)


def main(model: str, port: int) -> None:
    from threading import Lock

    from nanovllm import LLM, SamplingParams  # type: ignore[import-not-found]

    llm, lock = LLM(model, enforce_eager=True), Lock()

    def generate(ids: list[int], temperature: float, max_tokens: int, ignore_eos: bool) -> list[int]:
        params = SamplingParams(max(temperature, 1e-5), max_tokens, ignore_eos)
        with lock:
            return list(llm.generate([ids], params, use_tqdm=False)[0]["token_ids"])

    serve(generate, llm.tokenizer, model, port).serve_forever()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
