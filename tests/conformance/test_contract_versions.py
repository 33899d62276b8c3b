"""Versions of contracts: what is recorded is what is there, and what a new version may change."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from typer.testing import CliRunner

from diptych.shared.tools.cli import app
from diptych.shared.tools.conformance.clauses import contract_versions
from diptych.shared.tools.conformance.clauses.contract_versions import (
    older_than_current,
    parse_version,
    reasons_for_major,
    recorded,
    versions_of,
)
from diptych.shared.tools.conformance.clauses.suite import CONTRACTS
from tests.conformance import record_contracts
from tests.conformance.record_contracts import changed, next_record

INTERFACE = {
    "Cache.match": "abstract (self, key)",
    "Cache.evict": "abstract (self, n)",
    "Cache.size": "(self)",
    "Match": "(slots, node)",
}


def test_contracts_are_as_recorded() -> None:
    """After a change: python -m tests.conformance.record_contracts --minor "what is new"."""
    assert changed() == {}
    assert list(recorded()) == list(CONTRACTS)


def test_versions_go_up_and_each_says_what_it_changes() -> None:
    for component, record in recorded().items():
        versions = [parse_version(version) for version in record["changes"]]
        assert versions == sorted(set(versions)), component
        assert all(record["changes"].values()), component
        assert {since for since, _ in record["clauses"].values()} <= set(record["changes"]), component


@pytest.mark.parametrize(
    ("change", "reasons"),
    [
        ({"Cache.nodes": "(self)"}, []),
        ({"Cache.nodes": "abstract (self)"}, ["Cache.nodes is new and abstract"]),
        ({"Cache.evict": "(self, n)"}, []),
        ({"Cache.size": "abstract (self)"}, ["Cache.size has become abstract"]),
        (
            {"Cache.match": "abstract (self, key, limit=None)"},
            ["Cache.match takes (self, key, limit=None), not (self, key)"],
        ),
        ({"Match": "(slots, node, hits=0, used=None)"}, []),
        ({"Match": "(slots, node, hits)"}, ["Match takes (slots, node, hits), not (slots, node)"]),
        ({"Match": "(slots, leaf)"}, ["Match takes (slots, leaf), not (slots, node)"]),
        ({"Cache.match": None}, []),
        ({"Cache.size": None}, ["Cache.size, which implementations inherit, is gone"]),
    ],
    ids=[
        "method",
        "abstract",
        "default",
        "no default",
        "parameter",
        "fields",
        "no default of a field",
        "field",
        "not needed",
        "not inherited",
    ],
)
def test_change_of_an_interface_that_needs_a_major_version(
    change: dict[str, str | None], reasons: list[str]
) -> None:
    new = {name: text for name, text in {**INTERFACE, **change}.items() if text is not None}
    assert reasons_for_major(INTERFACE, new) == reasons


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The record of the radix cache, which a test may change: the contract has moved on since."""
    records = copy.deepcopy(recorded())
    for module in (contract_versions, record_contracts):
        monkeypatch.setattr(module, "recorded", lambda: records)
    for clause in records["radix_cache"]["clauses"].values():
        clause[0] = "1.0"
    return records["radix_cache"]


def test_a_changed_clause_is_noticed_and_recorded_with_its_version(record: dict[str, Any]) -> None:
    record["clauses"]["whole-pages"][1] = "another"
    del record["clauses"]["copies"]
    assert changed() == {"radix_cache": ["copies", "whole-pages"]}
    record["changes"] = {"1.0": "first", "1.1": "second"}
    new = next_record("radix_cache", False, "copies")
    assert new["changes"] == {"1.0": "first", "1.1": "second", "1.2": "copies"}
    since = {name: since for name, (since, _) in new["clauses"].items()}
    assert {name for name, version in since.items() if version == "1.2"} == {"copies", "whole-pages"}
    assert next_record("radix_cache", True, "copies")["changes"]["2.0"] == "copies"


def test_a_new_field_of_a_type_beside_the_interface_is_noticed(record: dict[str, Any]) -> None:
    assert record["interface"]["MatchResult"] == "(device_indices, last_node)"
    record["interface"]["MatchResult"] = "(device_indices)"
    assert changed()["radix_cache"] == ["MatchResult"]


def test_a_new_abstract_method_is_no_minor_version(record: dict[str, Any]) -> None:
    before = list(record["changes"])
    del record["interface"]["PrefixCache.evict"]
    with pytest.raises(ValueError, match=r"radix_cache needs a major version: PrefixCache\.evict is new"):
        next_record("radix_cache", False, "evict")
    assert list(next_record("radix_cache", True, "evict")["changes"]) == [*before, "2.0"]


def test_what_has_changed_since_a_component_was_written(record: dict[str, Any]) -> None:
    record["changes"] = {"1.0": "first", "1.1": "Copies.", "2.0": "Nodes."}
    record["clauses"]["copies"][0] = "1.1"
    record["clauses"]["bigrams"][0] = "2.0"
    assert older_than_current("radix_cache", "") is None
    assert older_than_current("radix_cache", "2.0") is None
    assert older_than_current("radix_cache", "1.1") == (
        "radix_cache was written for contract 1.1, the contract is 2.0 (major: an implementation may need a "
        "change); 2.0: Nodes.; clauses new or changed since 1.1: bigrams"
    )
    assert "1.1: Copies.; 2.0: Nodes.; clauses new or changed since 1.0: copies, bigrams" in str(
        older_than_current("radix_cache", "1.0")
    )
    with pytest.raises(
        ValueError, match=r"no contract 1\.7 of radix_cache; the versions are 1\.0, 1\.1, 2\.0"
    ):
        older_than_current("radix_cache", "1.7")
    with pytest.raises(ValueError, match=r"newer than this Diptych, which has 2\.0"):
        older_than_current("radix_cache", "2.1")


def test_check_says_that_a_component_is_older(record: dict[str, Any]) -> None:
    record["changes"] = {"1.0": "first", "1.1": "Copies."}
    options = ["check", "radix_cache", "reference", "--clause", "copies", "--contract"]
    older = CliRunner().invoke(app, [*options, "1.0"])
    assert older.exit_code == 0
    assert "written for contract 1.0, the contract is 1.1 (minor); 1.1: Copies." in older.stderr
    assert CliRunner().invoke(app, [*options, "1.1"]).stderr == ""
    newer = CliRunner().invoke(app, [*options, "1.2"])
    assert (newer.exit_code, "upgrade Diptych" in newer.stderr) == (2, True)


@pytest.mark.parametrize("text", ["1", "1.", "one.0", "1.0.0", "-1.0", ""])
def test_a_version_is_a_pair_of_numbers(text: str) -> None:
    with pytest.raises(ValueError, match=r"major\.minor"):
        parse_version(text)


def test_versions_of_an_unknown_component() -> None:
    with pytest.raises(ValueError, match="no contract for 'cache'; there are contracts for schedule_policy"):
        versions_of("cache")
