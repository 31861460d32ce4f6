"""`/openapi.json` and `/docs`: the routes with the models of their bodies and replies.

Handlers read raw bodies and write bytes, so the models cannot be taken from their signatures. Instead, the models are
named where a route is added.
"""

import inspect
from collections.abc import Sequence
from functools import cache
from typing import Any, Literal

import msgspec
from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from pydantic import TypeAdapter
from starlette.responses import Response

from .common.operation import Operation

JsonSchema = dict[str, Any]


def add_documentation(app: FastAPI, operations: Sequence[Operation]) -> None:
    """Adds both routes, without authentication: a browser cannot send a key with `/docs`, and the schema shows no
    configuration.
    """

    @cache
    def document() -> bytes:  # made when it is first requested, because that takes 0.1 s
        return _make_document(operations)

    @app.api_route("/openapi.json", methods=["GET", "HEAD"])
    async def openapi_json() -> Response:
        return Response(document(), media_type="application/json")

    @app.api_route("/docs", methods=["GET", "HEAD"])
    async def docs() -> Response:
        return get_swagger_ui_html(openapi_url="openapi.json", title="pdserve")


def _make_document(operations: Sequence[Operation]) -> bytes:
    types: list[tuple[tuple[Operation, str], Literal["validation"], TypeAdapter[Any]]] = [
        ((operation, kind), "validation", TypeAdapter(getattr(operation, kind)))
        for operation in operations
        for kind in ("body", "reply", "event", "error")
        if getattr(operation, kind) is not None
    ]
    schemas, definitions = TypeAdapter.json_schemas(types, ref_template="#/components/schemas/{model}")
    paths: dict[str, JsonSchema] = {}
    for operation in operations:
        used = {kind: schema for ((of, kind), _), schema in schemas.items() if of == operation}
        path = paths.setdefault(operation.path.replace(":path", ""), {})
        path[operation.method.lower()] = _describe(operation, used)
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "pdserve", "version": "1"},
            "paths": paths,
            "components": {
                "schemas": definitions["$defs"],
                "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            },
            "security": [{"key": []}],
        }
    )


def _describe(operation: Operation, schemas: dict[str, JsonSchema]) -> JsonSchema:
    content = {"application/json": {"schema": schemas["reply"]}} if "reply" in schemas else {"text/plain": {}}
    if "event" in schemas:
        content["text/event-stream"] = {"schema": schemas["event"]}
    described: JsonSchema = {
        "summary": inspect.getdoc(operation.handler),
        "responses": {
            "200": {"description": "Success", "content": content},
            "default": {"description": "Error", "content": {"application/json": {"schema": schemas["error"]}}},
        },
    }
    if operation.accepts:
        described["responses"]["202"] = {"description": "Accepted", "content": content}
    if "{" in operation.path:
        described["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
    if "body" in schemas:
        described["requestBody"] = {"required": True, "content": {"application/json": {"schema": schemas["body"]}}}
    return described
