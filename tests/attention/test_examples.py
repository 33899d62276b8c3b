"""The attention backends of docs/examples hold their contract, and bugs in such a function are caught."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from diptych.reference.attention import TorchAttention
from diptych.shared.modeling.paged_decode import PagedDecodeAttention
from diptych.shared.tools.conformance.clauses.clause import Clause
from diptych.shared.tools.conformance.clauses.suite import Verdict, check_implementation, clauses_of
from diptych.shared.tools.conformance.oracles.attention_batches import RefusalWarning
from tests.conformance.fast_cut import fast_clauses

ROOT = Path(__file__).parents[2]


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


paged_decode = example("my_paged_decode").paged_decode


def failures(impl: type, clauses: list[Clause]) -> list[Verdict]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RefusalWarning)
        return [
            v
            for v in check_implementation(clauses, impl, TorchAttention, shrink_failures=False)
            if not v.holds
        ]


@pytest.mark.parametrize("name", ["my_attention", "my_paged_decode"])
@pytest.mark.parametrize("cut", ["fast", pytest.param("whole", marks=pytest.mark.full)])
def test_the_examples_hold_the_contract(name: str, cut: str) -> None:
    clauses = fast_clauses("attention") if cut == "fast" else clauses_of("attention")
    found = failures(example(name).MyAttention, clauses)
    assert [(v.clause.name, v.case.name, v.failure) for v in found] == []


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_the_example_refuses_each_fp8_pool(dtype: torch.dtype) -> None:
    pools = SimpleNamespace(req_to_token=torch.zeros(1, 1)), SimpleNamespace(dtype=dtype)
    with pytest.raises(ValueError, match="no FP8"):
        example("my_attention").MyAttention(*pools)


def unmasked_last_page(q: Any, k: Any, v: Any, page_table: Any, lens: Any) -> torch.Tensor:
    """Sees the whole last page."""
    page_size = k.shape[1]
    return paged_decode(q, k, v, page_table, (lens + page_size - 1) // page_size * page_size)


def one_token_too_few(q: Any, k: Any, v: Any, page_table: Any, lens: Any) -> torch.Tensor:
    return paged_decode(q, k, v, page_table, (lens - 1).clamp(min=1))


def interleaved_groups(q: Any, k: Any, v: Any, page_table: Any, lens: Any) -> torch.Tensor:
    """Query head h reads KV head h % num_kv_heads."""
    num_kv_heads = k.shape[2]
    grouped = q.unflatten(1, (-1, num_kv_heads)).transpose(1, 2).flatten(1, 2)
    output = paged_decode(grouped, k, v, page_table, lens)
    return output.unflatten(1, (num_kv_heads, -1)).transpose(1, 2).flatten(1, 2)


@pytest.mark.parametrize("function", [unmasked_last_page, one_token_too_few, interleaved_groups])
def test_bugs_of_a_paged_decode_function_are_caught(function: Any) -> None:
    mutant = type("Mutant", (PagedDecodeAttention,), {"paged_decode": staticmethod(function)})
    names = ("decode", "heads-in-groups")
    assert failures(mutant, [clause for clause in fast_clauses("attention") if clause.name in names]) != []
