"""How far attention in float32 is off because scores are sums in float32, when they are large.

python -m tests.kernel_check.sums_of_scores [SEEDS] prints the largest errors; with vLLM's CPU kernel, where
its wheel is a folder of PYTHONPATH, it records them in `sums_of_scores.json`.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from diptych.shared.tools.conformance.kernels.attention_likes import EXTEND_LIKE
from diptych.shared.tools.conformance.kernels.attention_suspects import rounding_of_scores

FILE = Path(__file__).with_name("sums_of_scores.json")
ONCE, SUMS, VLLM = "rounded to float32 once", "float32 sums, one product after another", "vLLM's kernel"
Scores = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
(SHARP,) = (each for each in EXTEND_LIKE.cases if each.name == "sharp, page 16, float32")


def one_after_another(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """[m, d], [n, d] -> [m, n]: each product is rounded to float32 and added to a float32 sum."""
    total = torch.zeros(len(q), len(k))
    for d in range(q.shape[1]):
        total += q[:, d, None] * k[None, :, d]
    return total.double()


def rounded_once(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return (q.double() @ k.double().T).float().double()


def with_tf32(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """10 bits of each mantissa are left, as in tensor cores of TF32."""
    q, k = ((x.contiguous().view(torch.int32) & -0x2000).view(torch.float32) for x in (q, k))
    return q.double() @ k.double().T


def attend_with(scores: Scores) -> Callable[..., torch.Tensor]:
    """Attention whose scores alone are not in float64."""

    def attend(q: Any, k: Any, v: Any, table: Any, lens: Any, starts: Any) -> torch.Tensor:
        out, group = torch.empty_like(q), q.shape[1] // k.shape[2]
        for i, length in enumerate(lens.tolist()):
            keys, values = (x[table[i].long()].flatten(0, 1)[:length] for x in (k, v))
            rows = slice(int(starts[i]), int(starts[i + 1]))
            new = rows.stop - rows.start
            is_seen = torch.ones(new, length, dtype=torch.bool).tril(length - new)
            for h in range(q.shape[1]):
                s = scores(q[rows, h], keys[:, h // group]) * q.shape[2] ** -0.5
                shares = s.masked_fill(~is_seen, -torch.inf).softmax(-1)
                out[rows, h] = (shares @ values[:, h // group].double()).float()
        return out

    return attend


def main() -> None:
    functions = {ONCE: attend_with(rounded_once), SUMS: attend_with(one_after_another)}
    if importlib.util.find_spec("vllm"):
        from tests.kernel_check.vllm_functions import vllm_functions

        functions[VLLM] = vllm_functions()["attention.extend", "torch"]
    num_seeds = int(sys.argv[1]) if sys.argv[1:] else 20
    errors, limits, apart = dict.fromkeys(functions, 0.0), [], 0.0
    for seed in range(num_seeds):
        problem = EXTEND_LIKE.make(SHARP, False, seed)
        args = [problem[name] for name in ("q", "k", "v", "page_table", "lens", "qo_indptr")]
        results = {name: function(*args).double() for name, function in functions.items()}
        for name, result in results.items():
            errors[name] = max(errors[name], float((result - problem.expected["out"]).abs().max()))
        limits.append(rounding_of_scores(problem))
        apart = max(apart, float((results.get(VLLM, results[SUMS]) - results[SUMS]).abs().max()))
    found = {"seeds": num_seeds, "largest errors": errors, "least allowed": min(limits)}
    if VLLM in functions:
        found["vLLM from float32 sums"] = apart
        FILE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
