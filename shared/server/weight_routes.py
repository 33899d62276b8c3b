"""New weights over HTTP, with SGLang's names of paths. A refusal is a 400 and changes nothing."""

from __future__ import annotations

import base64
import binascii
from typing import Annotated, Any

from fastapi import Depends, FastAPI
from pydantic import Field

from diptych.shared.server.admin import folder_below
from diptych.shared.server.api.body import Body
from diptych.shared.server.api.state import ServerState
from diptych.shared.server.http.access import require_admin
from diptych.shared.server.http.errors import bad_request

Names = Annotated[list[str], Field(min_length=1)]
Shape = Annotated[list[Annotated[int, Field(ge=0, le=2**48)]], Field(max_length=8)]


class FromDisk(Body):
    """/update_weights_from_disk"""

    model_path: Annotated[str, Field(min_length=1)]


class FromTensor(Body):
    """/update_weights_from_tensor. data: of each tensor its bytes in base64. cuda_handles: of each the fields
    of `diptych.shared.parallel.cuda_memory.Handle`, bytes in base64. One of the two."""

    names: Names
    dtypes: list[str]
    shapes: list[Shape]
    data: list[str] = Field(default_factory=list)
    cuda_handles: list[dict[str, Any]] = Field(default_factory=list)


class FromDistributed(Body):
    """/update_weights_from_distributed: what the trainer sends."""

    names: Names
    dtypes: list[str]
    shapes: list[Shape]


class ByName(Body):
    """/get_weights_by_name"""

    name: str


def add_weight_routes(app: FastAPI, state: ServerState) -> None:
    """Reading and changing the model's weights, for administrators."""
    admin = [Depends(require_admin)]

    async def run(action: str, **args: Any) -> dict[str, Any]:
        try:
            found = await state.client.control(action, **args)
        except ValueError as error:
            raise bad_request(str(error)) from None
        state.client.load.weight_version = found.get("weight_version", state.client.load.weight_version)
        return {"success": True, **found}

    @app.post("/update_weights_from_disk", dependencies=admin)
    async def update_weights_from_disk(body: FromDisk) -> dict[str, Any]:
        """From a checkpoint of the same model, below --weights-root."""
        root = state.settings.weights_root
        return await run("update_weights_from_disk", path=str(folder_below(root, body.model_path, "weights")))

    @app.post("/update_weights_from_tensor", dependencies=admin)
    async def update_weights_from_tensor(body: FromTensor) -> dict[str, Any]:
        """From the tensors of the body, or from memory of a GPU of this computer."""
        if bool(body.data) == bool(body.cuda_handles):
            raise bad_request("give either data or cuda_handles", "data")
        given = body.data or body.cuda_handles
        specs = _specs(body, len(given))
        try:
            data = [base64.b64decode(each, validate=True) for each in body.data]
            handles = [_handle(each) for each in body.cuda_handles]
        except (binascii.Error, ValueError, TypeError) as error:
            raise bad_request(f"bytes must be base64: {error}", "data") from None
        return await run("update_weights_from_tensor", specs=specs, data=data, handles=handles)

    @app.post("/init_weights_update_group", dependencies=admin)
    async def init_weights_update_group() -> dict[str, Any]:
        """Invite a trainer of this computer: the answer is the argument of its `WeightSender`."""
        return await run("init_weights_update_group")

    @app.post("/update_weights_from_distributed", dependencies=admin)
    async def update_weights_from_distributed(body: FromDistributed) -> dict[str, Any]:
        """From the invited trainer, which sends these tensors meanwhile."""
        return await run("update_weights_from_distributed", specs=_specs(body, len(body.names)))

    @app.post("/get_weights_by_name", dependencies=admin)
    async def get_weights_by_name(body: ByName) -> dict[str, Any]:
        """A weight as it is in memory, its bytes in base64."""
        found = await run("get_weights_by_name", name=body.name)
        return {**found, "data": base64.b64encode(found["data"]).decode()}


def _specs(body: FromTensor | FromDistributed, num_given: int) -> list[Any]:
    lengths = {len(body.names), len(body.dtypes), len(body.shapes), num_given}
    if len(lengths) > 1:
        raise bad_request("names, dtypes, shapes and contents must be of one length", "names")
    return list(zip(body.names, body.dtypes, body.shapes))


def _handle(fields: dict[str, Any]) -> dict[str, Any]:
    names = ("memory", "counter", "event")
    return {
        name: base64.b64decode(value, validate=True) if name in names else value
        for name, value in fields.items()
    }
