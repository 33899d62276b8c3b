"""Constraints on the output, as the public servers name them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from diptych.shared.server.api.body import Body
from diptych.shared.server.http.errors import bad_request


class JsonSchemaFormat(Body):
    name: str = "schema"
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


Schema = str | dict[str, Any]
Choices = Annotated[list[str], Field(min_length=1)]


class StructuredOutputs(Body):
    """vLLM's `structured_outputs`."""

    json_: Schema | None = Field(None, alias="json")
    json_object: bool = False
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    structural_tag: str | None = None


class GrammarFields(Body):
    """Constraints on the output under the names that public servers have for them. At most one is given."""

    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    response_format: ResponseFormat | None = None

    def grammar_params(self) -> dict[str, Any]:
        """The field of SamplingParams that the body asks for; 400 for more than one."""
        found: list[tuple[str, Any]] = [
            ("json_schema", self.guided_json),
            ("regex", self.guided_regex),
            ("choice", self.guided_choice),
            ("ebnf", self.guided_grammar),
            ("regex", self.regex),
            ("ebnf", self.ebnf),
        ]
        given = self.structured_outputs
        if given is not None:
            found += [
                ("json_schema", given.json_),
                ("json_object", given.json_object or None),
                ("regex", given.regex),
                ("choice", given.choice),
                ("ebnf", given.grammar),
                ("structural_tag", given.structural_tag),
            ]
        shape = self.response_format
        if shape is not None and shape.type == "json_object":
            found.append(("json_object", True))
        elif shape is not None and shape.type == "json_schema":
            if shape.json_schema is None or shape.json_schema.schema_ is None:
                raise bad_request("response_format json_schema needs json_schema.schema", "response_format")
            found.append(("json_schema", shape.json_schema.schema_))
        asked = [(name, value) for name, value in found if value is not None]
        if len(asked) > 1:
            names = " and ".join(name for name, _ in asked)
            raise bad_request(f"{names}: only one constraint on the output can be given")
        return {name: tuple(value) if name == "choice" else value for name, value in asked}
