"""`diptych size`: its formulas are those of the step's bound, and agree with recorded runs and with the
calculator of the site."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from diptych.shared.config import EngineConfig, ModelConfig, parse_config
from diptych.shared.config.hf_config import read_config
from diptych.shared.loading.model_path import resolve_model_path
from diptych.shared.loading.quantize import with_quantization
from diptych.shared.tools.bench.size import CARDS, Formula, formula_of
from diptych.shared.tools.bench.step_cost import Ceilings, step_cost
from diptych.shared.tools.cli import app
from diptych.shared.tools.conformance.oracles.hybrid_configs import HYBRID_CONFIGS
from docs.generators.measured import DATA, load

ROOT = Path(__file__).parents[2]
KV_DTYPES = {"float8_e4m3fn": torch.float8_e4m3fn, "bfloat16": torch.bfloat16}


@cache
def shape(name: str, quantization: str | None = None) -> ModelConfig:
    config = read_config(resolve_model_path(name, "dummy"))
    return config if quantization is None else with_quantization(config, quantization)


@cache
def formula(name: str, quantization: str | None, kv: str, num_ranks: tuple[int, int], chunk: int) -> Formula:
    tp, ep = num_ranks
    config = EngineConfig().updated(model=name, tp=tp, ep=ep, chunked_prefill_size=chunk)
    return formula_of(shape(name, quantization), config, torch.bfloat16, KV_DTYPES[kv])


def runs(pattern: str) -> list[tuple[str, dict[str, Any]]]:
    """Results with flags in recordings on an H200."""
    found = []
    for path in sorted(DATA.glob(pattern)):
        data = load(path.stem)
        found += [(path.name, each) for each in (data, *data["results"]) if "num_pool_tokens" in each]
    return found


def of_run(run: dict[str, Any]) -> Formula:
    flags = run["flags"]
    ranks = flags["tp"], flags["ep"]
    kv = run["kv_cache_dtype"]
    return formula(flags["model"], flags["quantization"], kv, ranks, flags["chunked_prefill_size"])


def test_pools_of_recorded_runs() -> None:
    wrong, num = {}, 0
    for file, run in [*runs("latency-*.json"), *runs("offline-*.json"), *runs("steps*.json")]:
        if run["flags"].get("cuda_graph_max_tokens") == 0:
            continue  # fewer graphs than the default
        num += 1
        found = of_run(run).num_slots(CARDS["H200"].memory, run["flags"]["mem_fraction_static"])
        if abs(found / run["num_pool_tokens"] - 1) > 0.05:
            wrong[file, run["flags"]["model"]] = (found, run["num_pool_tokens"])
    assert num >= 20
    assert wrong == {}


def test_steps_of_recorded_runs() -> None:
    """The weights and the KV that a step read, its bound by the card's data, and its time from its share."""
    cases = [(file, run) for file, run in runs("steps.json") if run["mode"] == "decode"]
    assert len(cases) >= 10
    for file, run in cases:
        mine, size = of_run(run), (run["batch_size"], run["context_len"])
        name = f"{file} {run['model']} {size}"
        num_bytes, flops = mine.step(*size)
        if run["num_experts_hit"] is None or not run["is_routing_counted"]:
            assert num_bytes == pytest.approx(run["weight_bytes"] + run["kv_bytes"], rel=1e-6), name
        assert flops == pytest.approx(run["flops"], rel=1e-6), name
        bound = mine.bound(*size, CARDS["H200"].ceilings)
        assert bound == pytest.approx(run["bound_s"], rel=0.05), name
        assert bound / run["share_of_bound"] == pytest.approx(run["step_s"]["median"], rel=0.05), name


@pytest.mark.parametrize("name", ["Qwen3-30B-A3B", "gemma-3-1b", "gpt-oss-20b", "DeepSeek-V2-Lite"])
def test_formula_is_the_cost_of_a_step(name: str) -> None:
    mine = formula(name, None, "bfloat16", (1, 1), 8192)
    for batch, context in ((1, 1), (3, 500), (200, 5000)):
        cost = step_cost(shape(name), [context] * batch, [1] * batch, torch.bfloat16)
        assert mine.step(batch, context) == pytest.approx((cost.num_bytes, cost.flops), rel=1e-9)
        ceilings = Ceilings(3e12, 5e14)
        assert mine.bound(batch, context, ceilings) == pytest.approx(cost.bound(ceilings), rel=1e-9)


def test_states_are_read_and_take_memory() -> None:
    config, dtype = parse_config(HYBRID_CONFIGS["qwen3.5"]), torch.bfloat16
    mine = formula_of(config, EngineConfig(), dtype, dtype)
    for batch, context in ((1, 1), (3, 500)):
        cost = step_cost(config, [context] * batch, [1] * batch, dtype)
        assert mine.step(batch, context) == pytest.approx((cost.num_bytes, cost.flops), rel=1e-9)
    fewer = formula_of(config, EngineConfig(max_kept_states=1), dtype, dtype)
    state = 3 * (6 * 12 * 20 * 4 + 3 * (2 * 24 + 120) * 2)
    assert mine.reserved - fewer.reserved == (EngineConfig().max_running_requests - 1) * state


@pytest.mark.full
@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_calculator_has_the_same_formulas() -> None:
    from docs.generators.tables import calculator

    found = re.fullmatch(r"<script[^>]*>(.*)</script>", calculator())
    assert found is not None
    data = json.loads(found.group(1))
    script = """
        const { numSlots, stepBound } = require(process.argv[1]);
        const { models, cards, config } = JSON.parse(require("fs").readFileSync(0));
        const found = {};
        for (const [name, precisions] of Object.entries(models))
          for (const [precision, model] of Object.entries(precisions))
            for (const [card, its] of Object.entries(cards)) {
              const slots = numSlots(model, its, config);
              found[[name, precision, card]] = [slots, stepBound(model, its, 7, 3000).seconds];
            }
        console.log(JSON.stringify(found));
    """
    command = ["node", "-e", script, str(ROOT / "docs" / "javascripts" / "calculator.js")]
    done = subprocess.run(command, input=found.group(1), capture_output=True, text=True, check=True)
    theirs = json.loads(done.stdout)
    assert len(theirs) > 100
    for name, precisions in data["models"].items():
        for precision, model in precisions.items():
            mine = Formula(**{**model, "layers": tuple(map(tuple, model["layers"]))})
            for card in CARDS.values():
                slots, seconds = theirs[f"{name},{precision},{card.name}"]
                assert abs(slots - mine.num_slots(card.memory, 0.9)) <= 1
                assert seconds == pytest.approx(mine.bound(7, 3000, card.ceilings), rel=1e-9)


def test_command() -> None:
    result = CliRunner().invoke(app, ["size", "Qwen/Qwen3-8B", "--gpu", "H100,H200", "--json"])
    first, second = json.loads(result.stdout)
    assert (first["card"], second["card"]) == ("H100", "H200")
    assert first["weights"] == second["weights"] == 16_381_470_720
    assert first["max_requests"] < second["max_requests"]
    assert "KV of a token" in CliRunner().invoke(app, ["size", "tiny-dense", "--context", "100"]).stdout


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ("Qwen3-14B --gpu RTX-4090", "no request of 4096 tokens fits: the weights take 27.5 of 23.8 GiB"),
        ("Qwen3-8B --gpu H101", "no card 'H101'"),
        ("Qwen3-8B --context 50000", "--context 50000 exceeds the 40960 positions of Qwen3-8B"),
        ("nothing", "no model 'nothing'"),
    ],
)
def test_refusals(arguments: str, problem: str) -> None:
    result = CliRunner().invoke(app, ["size", *arguments.split()])
    assert result.exit_code == 2
    assert problem in result.stderr
