"""The commands of the results that the measurement pages show: docs/measurements/data/, one JSON file each.

docs/generators/record_measurements.py runs them.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
DATA = ROOT / "docs" / "measurements" / "data"

SHAPES = ("Qwen3-0.6B", "Qwen3-8B", "Llama-3.1-8B", "Qwen3-14B", "Qwen3-30B-A3B")
TP_SHAPES = ("Qwen3-8B", "Qwen3-14B")
"""With two ranks."""
FP8_SHAPES = ("Qwen3-8B", "Qwen3-14B", "Qwen3-30B-A3B")


class Recording(NamedTuple):
    """command: ends with the option for the file. seconds: an estimate, on H200s."""

    command: str
    seconds: int = 0
    num_gpus: int = 1


OFFLINE = "diptych bench offline --workload offline-256 --repeats 1 --model"
LATENCY = "diptych bench latency --model"
STEP = "diptych bench step --repeats 20 --model"
PREFILL = f"{STEP} Qwen3-0.6B,Qwen3-8B --mode prefill --batch 1 --prefill-tokens 128,1024,8192"
ROUND = "diptych bench round --model Qwen3-8B --speculative eagle3 --speculative-draft-model Qwen3-8B-eagle3"
LONG = "diptych bench offline --workload long-prompts --model Qwen3-8B --seconds 5 --repeats 1"
PAIRS = (
    "diptych bench offline --concurrency 1,16,256 --input-len 128 --output-len 256 --temperature 0 --no-limit"
)
SERVE = "diptych bench serve --model Qwen3-8B --load-format dummy --input-len 1024"
RATES = f"{SERVE} --output-len 256 --num-requests 120 --ttft-target 300 --tpot-target 20"
FP8 = "--quantization fp8 --kv-cache-dtype fp8_e4m3"
MIXED = "--enable-mixed-chunk --chunked-prefill-size"
PROFILE = "--batch 64,128,200,256 --context 1024 --profile --json"
PREFIX_CACHE = "diptych bench prefix-cache --page-size 1 --repeats 100"

RECORDINGS = {
    "steps": Recording(f"{STEP} {','.join(SHAPES)} --batch 1,16,64,256 --context 1024 --json", 110),
    **{
        f"offline-{shape}": Recording(f"{OFFLINE} {shape} -o", seconds)
        for shape, seconds in zip(SHAPES, (35, 65, 65, 95, 110))
    },
    **{
        f"latency-{shape}": Recording(f"{LATENCY} {shape} -o", seconds)
        for shape, seconds in zip(SHAPES, (20, 25, 25, 30, 40))
    },
    "steps-eager": Recording(
        f"{STEP} Qwen3-8B --batch 1,64,256 --context 1024 --disable-cuda-graph --json", 20
    ),
    **{
        f"steps-{name}": Recording(f"{STEP} Qwen3-8B --batch 1,64 --context 1024 {flags} --json", 20)
        for name, flags in (
            ("fp8", "--quantization fp8"),
            ("fp8-kv", FP8),
            ("int4", "--quantization int4"),
        )
    },
    **{
        f"offline-{shape}-fp8": Recording(f"{OFFLINE} {shape} {FP8} -o", seconds)
        for shape, seconds in zip(FP8_SHAPES, (60, 75, 100))
    },
    **{
        f"profile-{shape}": Recording(f"{STEP} {shape} {PROFILE}", 30)
        for shape in ("Qwen3-8B", "Qwen3-30B-A3B")
    },
    **{f"profile-{shape}-fp8": Recording(f"{STEP} {shape} {FP8} {PROFILE}", 30) for shape in FP8_SHAPES},
    "layers-fp8": Recording(
        "diptych bench quantization --model Qwen3-8B --schemes fp8,int4 --tokens 1,16,64,256,2048,8192 -o", 40
    ),
    "steps-other": Recording(
        f"{STEP} DeepSeek-V2-Lite,gpt-oss-20b --batch 1,64,256 --context 1024 --json", 60
    ),
    "offline-DeepSeek-V2-Lite": Recording(f"{OFFLINE} DeepSeek-V2-Lite -o", 75),
    "decode-attention-fa3": Recording(
        "python -m diptych.shared.tools.bench.attention_cost --backends triton,fa3 --batch 1,8,64,256 "
        "--context 1024 --json",
        25,
    ),
    "prefill": Recording(f"{PREFILL} --json", 30),
    "prefill-eager": Recording(f"{PREFILL} --disable-cuda-graph --json", 25),
    "mixed": Recording(f"{STEP} Qwen3-8B --mode mixed --batch 128,200 --prefill-tokens 320,512 --json", 25),
    "decode-attention": Recording(
        "python -m diptych.shared.tools.bench.attention_cost --backends triton,flashinfer,deterministic "
        "--batch 8,32,64,128,256 --context 1024 --json",
        30,
    ),
    "round-tree": Recording(f"{ROUND} -o", 30),
    "round-chain": Recording(
        f"{ROUND} --speculative-num-steps 3 --speculative-topk 1 --speculative-num-draft-tokens 4 -o", 30
    ),
    "speculation": Recording(
        "diptych bench speculation --speculative eagle3 --speculative-draft-model tiny-dense-eagle3 "
        "--dtype bfloat16 --batch 1,8,32 -o",
        40,
    ),
    "itl": Recording(f"{LONG} -o", 35),
    "itl-512": Recording(f"{LONG} {MIXED} 512 -o", 35),
    "itl-256": Recording(f"{LONG} {MIXED} 256 -o", 35),
    "overlap-0.6B": Recording(f"{PAIRS} --model Qwen3-0.6B -o", 30),
    "sequential-0.6B": Recording(f"{PAIRS} --model Qwen3-0.6B --use scheduler=reference -o", 35),
    "overlap-8B": Recording(f"{PAIRS} --model Qwen3-8B -o", 45),
    "sequential-8B": Recording(f"{PAIRS} --model Qwen3-8B --use scheduler=reference -o", 50),
    "shared-prefix-0.6B": Recording(
        "diptych bench offline --workload shared-prefix --groups 16 --repeats 1 --model Qwen3-0.6B -o", 50
    ),
    "shared-prefix-8B": Recording(
        "diptych bench offline --workload shared-prefix --groups 16 --repeats 1 --model Qwen3-8B -o", 95
    ),
    **{
        f"pool-{tokens}": Recording(
            f"{OFFLINE} Qwen3-0.6B --num-requests 128 --no-limit --max-total-tokens {tokens} -o", seconds
        )
        for tokens, seconds in ((138016, 25), (27603, 35), (13801, 45), (6900, 60))
    },
    "offline-deterministic": Recording(f"{OFFLINE} Qwen3-8B --deterministic -o", 75),
    "offline-mixed": Recording(f"{OFFLINE} Qwen3-8B --schedule-policy lof {MIXED} 512 -o", 75),
    "offline-mixed-0.6B": Recording(f"{OFFLINE} Qwen3-0.6B {MIXED} 256 -o", 50),
    "serve-engine": Recording(
        f"{OFFLINE} Qwen3-8B --num-requests 384 --input-len 1024 --output-len 256 "
        "--max-running-requests 64 --no-limit --temperature 0 -o",
        80,
    ),
    "serve-engine-1": Recording(
        f"{LATENCY} Qwen3-8B --input-len 1024 --output-len 64 --temperature 0 --no-step -o", 25
    ),
    "serve-concurrency-64": Recording(f"{SERVE} --output-len 256 --num-requests 384 --concurrency 64 -o", 50),
    **{
        f"serve-concurrency-64-mixed-{size}": Recording(
            f"{SERVE} --output-len 256 --num-requests 192 --concurrency 64 {MIXED} {size} -o", 45
        )
        for size in (256, 128)
    },
    "serve-concurrency-1": Recording(f"{SERVE} --output-len 64 --num-requests 30 --concurrency 1 -o", 35),
    "serve-rates": Recording(f"{RATES} --request-rate 4,8,10,14,18 -o", 110),
    "serve-rates-mixed-256": Recording(f"{RATES} --request-rate 8,9.5 {MIXED} 256 -o", 60),
    "serve-rates-mixed-128": Recording(f"{RATES} --request-rate 6,8,9.5 {MIXED} 128 -o", 80),
    # With two GPUs.
    "all-reduce": Recording(
        "diptych bench allreduce --sizes 8,64,256,512,1024,2048,8192 --link 374 -o", 30, 2
    ),
    **{f"latency-{shape}-tp2": Recording(f"{LATENCY} {shape} --tp 2 -o", 60, 2) for shape in TP_SHAPES},
    "offline-Qwen3-14B-tp2": Recording(f"{OFFLINE} Qwen3-14B --tp 2 -o", 65, 2),
    **{
        f"steps-tp2{name}": Recording(
            f"diptych bench step --model Qwen3-30B-A3B --tp 2 {flags}--batch 1,64 --context 1024 --json",
            70,
            2,
        )
        for name, flags in (("", ""), ("-ep2", "--ep 2 "))
    },
    # Without a GPU.
    "shared-prefix-tiny": Recording(
        "diptych bench offline --workload shared-prefix --panel reference --groups 4 --group-size 8 "
        "--shared-len 512 --input-len 16 --output-len 8 -o",
        num_gpus=0,
    ),
    "scheduling": Recording("diptych bench scheduling --seconds 2 --waiting 10,1000,10000 -o", num_gpus=0),
    "radix-cache": Recording(f"{PREFIX_CACHE} --tokens 10000,1000000,10000000 -o", num_gpus=0),
    "radix-cache-depth": Recording(f"{PREFIX_CACHE} --tokens 1000000 --depth 1,16,64 -o", num_gpus=0),
}
"""Name of the file -> what writes it, the most important first."""
