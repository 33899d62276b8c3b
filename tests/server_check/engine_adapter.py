"""Serves an engine by its Python interface, for `diptych check server`: a small adapter.

python -m tests.server_check.engine_adapter MODEL 8000           # with nano-vllm installed, on a CUDA GPU
python -m tests.server_check.engine_adapter MODEL 8000 minisgl   # mini-sglang
diptych check server http://127.0.0.1:8000 --model MODEL --seeded greedy
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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


def main(model: str, port: int, engine: str = "nanovllm", options: str = "{}") -> None:
    """`options`: JSON, more arguments of the engine. All its work is done by one thread: mini-sglang's CUDA
    stream is that of the thread which made it."""
    build = {"nanovllm": nano_vllm, "minisgl": mini_sglang}[engine]
    one = ThreadPoolExecutor(1)
    generate, tokenizer = one.submit(build, model, json.loads(options)).result()
    serve(lambda *asked: one.submit(generate, *asked).result(), tokenizer, model, port).serve_forever()


def nano_vllm(model: str, options: dict[str, Any]) -> tuple[Generate, Any]:
    from nanovllm import LLM, SamplingParams  # type: ignore[import-not-found]

    llm = LLM(model, **{"enforce_eager": True, **options})

    def generate(ids: list[int], temperature: float, max_tokens: int, ignore_eos: bool) -> list[int]:
        params = SamplingParams(max(temperature, 1e-5), max_tokens, ignore_eos)
        return list(llm.generate([ids], params, use_tqdm=False)[0]["token_ids"])

    return generate, llm.tokenizer


def mini_sglang(model: str, options: dict[str, Any]) -> tuple[Generate, Any]:
    from minisgl.core import SamplingParams  # type: ignore[import-not-found]
    from minisgl.llm import LLM  # type: ignore[import-not-found]

    llm = LLM(model, **options)

    def generate(ids: list[int], temperature: float, max_tokens: int, ignore_eos: bool) -> list[int]:
        params = SamplingParams(temperature=temperature, ignore_eos=ignore_eos, max_tokens=max_tokens)
        return list(llm.generate([ids], params)[0]["token_ids"])

    return generate, llm.tokenizer


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
