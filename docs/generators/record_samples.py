"""Writes the outputs of commands that reference pages show: docs/samples/, one file each.

    python -m docs.generators.record_samples              # all
    python -m docs.generators.record_samples check diff   # some

A file has the command after a dollar sign, then its output. Times depend on the computer.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "samples"
SERVER = "http://127.0.0.1:8000"
JSON = "-H 'Content-Type: application/json' \\\n  -d"

SAMPLES = {
    "generate": 'diptych generate "What is 12 + 30?"',
    "generate-json": "diptych generate --json --logprobs --top-logprobs 2 -n 1 \\\n"
    '  "What is 12 + 30?" | python -m json.tool',
    "chat": "printf 'What is 12 + 30?\\n/stats\\n/exit\\n' | diptych chat",
    "error": "diptych generate --page-size 0 Hello",
    "doctor": "diptych doctor | sed -n '/│ panels/,$p'",
    "check-list": "diptych check layers --list",
    "check": "diptych check radix_cache docs/examples/my_radix_cache.py:MyRadixCache \\\n"
    "  --clause whole-pages --clause eviction-order",
    "pytest-plugin": "pytest --diptych docs/examples/my_radix_cache.py:MyRadixCache \\\n"
    "  --component radix_cache -k split- -r p --disable-warnings",
    "check-kernel": "diptych check kernel docs/examples/my_kernels.py:rms_norm_eps_outside \\\n"
    "  --like rms_norm --case bfloat16 --no-timing --seed 0",
    "check-kernel-list": "diptych check kernel --list",
    "pytest-plugin-fails": "mkdir -p build\n"
    "$ sed 's/= lower.lock_ref, upper/= 0, upper/' docs/examples/my_radix_cache.py > build/my_cache.py\n"
    "$ pytest --diptych build/my_cache.py:MyRadixCache --component radix_cache \\\n"
    "  --diptych-clause any-calls -x --disable-warnings",
    "check-stage": "diptych check --stage 05 docs/exercises/my_cache.py",
    "course": "diptych course start build/samples/engine\n$ cd build/samples/engine && diptych course",
    "course-grade": "cd build/samples/engine && diptych course grade 02",
    "course-lab": "diptych course lab 7",
    "course-engine": "cd build/engines/almost && diptych course engine --name almost",
    "course-leaderboard": "diptych course leaderboard",
    "serve": "diptych serve",
    "route": f"diptych route {SERVER}",
    "quantize": "diptych quantize tiny-dense --format int4 --output build/samples/my-int4\n"
    '$ diptych generate --model build/samples/my-int4 "What is 12 + 30?"',
    "convert": "diptych convert tiny-dense --output build/samples/tiny-dense.gguf --dtype q8_0",
    "diff": "diptych diff --b-flags page_size=16,chunked_prefill_size=64",
    "diff-precision": "diptych diff --b-model tiny-dense-fp8",
    "diff-server": f"diptych diff --a-flags quantization=int4 --b {SERVER} --dtype float32",
    "eval": "diptych eval",
    "eval-moe": "diptych eval --model tiny-moe",
    "soak": "diptych soak --seconds 20",
    "bench-offline": "diptych bench offline --concurrency 1,8 --input-len 32 --output-len 32 --repeats 1",
    "bench-latency": "diptych bench latency --concurrency 1,4 --input-len 64 --output-len 32 --repeats 1",
    "bench-serve": "diptych bench serve --concurrency 1,4 --num-requests 8 --input-len 64 --output-len 32",
    "bench-step": "diptych bench step --model tiny-dense --batch 1,8 --context 128",
    "bench-round": "diptych bench round --batch 1 --speculative eagle3 \\\n"
    "  --speculative-draft-model tiny-dense-eagle3",
    "bench-speculation": "diptych bench speculation --speculative ngram --num-prompts 4 --batch 1 \\\n"
    "  --repeats 1",
    "bench-scheduling": "diptych bench scheduling --waiting 10,100 --policy fcfs,lpm --seconds 0.2",
    "bench-allreduce": "diptych bench allreduce --sizes 8,64,1024",
    "bench-experts": "diptych bench experts --ranks 8 --redundant 16",
    "bench-prefix-cache": "diptych bench prefix-cache --tokens 10000 --repeats 50",
    "http-chat": f"curl -s {SERVER}/v1/chat/completions {JSON} "
    '\'{"messages": [{"role": "user", "content": "What is 12 + 30?"}], "temperature": 0}\' \\\n'
    "  | python -m json.tool",
    "http-stream": f"curl -sN {SERVER}/v1/chat/completions {JSON} "
    '\'{"messages": [{"role": "user", "content": "What is 12 + 30?"}], "max_tokens": 3, "stream": true}\'',
    "http-error": f"curl -s {SERVER}/v1/completions {JSON} "
    '\'{"prompt": "Hello", "temp": 0}\' | python -m json.tool',
    "http-check-server": f"diptych check server {SERVER} --model tiny-dense --dtype float32",
    "http-responses": f"curl -s {SERVER}/v1/responses {JSON} "
    '\'{"input": "What is 12 + 30?", "temperature": 0}\' | python -m json.tool',
    "http-messages": f"curl -s {SERVER}/v1/messages {JSON} "
    '\'{"max_tokens": 32, "messages": [{"role": "user", "content": "What is 12 + 30?"}]}\' \\\n'
    "  | python -m json.tool",
    "http-generate": f"curl -s {SERVER}/generate {JSON} "
    '\'{"text": "Otto is a baker. Otto", "sampling_params": {"temperature": 0, "max_new_tokens": 4}}\' \\\n'
    "  | python -m json.tool",
    "http-tokenize": f'curl -s {SERVER}/tokenize {JSON} \'{{"prompt": "12 + 30 ="}}\'',
    "http-health": f"curl -s {SERVER}/health; echo; curl -s {SERVER}/metrics | grep -v '^#' | head -5",
}
"""Name of the file -> the command, for bash in the root of the repository."""


ENDLESS = {"serve": "curl ", "route": "routing to"}
"""Commands that run until they are interrupted: here when a line has this text."""


def record(name: str, url: str) -> None:
    """Run one command and write its output. `url`: the server that stands for SERVER."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "96",
    }
    command = SAMPLES[name].replace(SERVER, url).replace("\n$ ", "\n")
    running = subprocess.Popen(
        ["bash", "-c", f"exec {command}" if name in ENDLESS else command],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert running.stdout is not None
    text = ""
    for line in running.stdout:
        text += line
        if name in ENDLESS and ENDLESS[name] in line:
            running.send_signal(signal.SIGINT)
    text = text.replace(url, SERVER).replace(f"{ROOT}/", "")
    lines = [line.rstrip() for line in f"$ {SAMPLES[name]}\n{text}".splitlines()]
    (FOLDER / f"{name}.txt").write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")
    print(f"{name}: exit status {running.wait()}")


def main(names: list[str]) -> None:
    from tests.server.running import serving

    wrong = sorted(set(names) - set(SAMPLES))
    if wrong:
        raise SystemExit(f"no sample {', '.join(wrong)}; there are {', '.join(SAMPLES)}")
    FOLDER.mkdir(exist_ok=True)
    shutil.rmtree(ROOT / "build" / "samples", ignore_errors=True)  # what commands write there
    (ROOT / "build" / "samples").mkdir(parents=True)
    with serving() as server:
        for name in names or SAMPLES:
            record(name, server.url)


if __name__ == "__main__":
    main(sys.argv[1:])
