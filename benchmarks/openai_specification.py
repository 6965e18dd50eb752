"""OpenAI's published specification of the paths that the gateway serves, as an OpenAPI document for schemathesis.

The `openai` package is generated from that specification: its parameter and answer types are its schemas. Here they are
put together again, for our paths alone, with the served model's name and with small answers, since each case is one
real request:

    python -m benchmarks.openai_specification --model demo > /tmp/openai.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

import openai.types as types
from openai.types.chat import ChatCompletion, completion_create_params
from openai.types.completion_create_params import CompletionCreateParamsNonStreaming
from openai.types.responses import Response, response_create_params
from pydantic import TypeAdapter

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
# Tokens of an answer, and answers of a request: every case is computed.
_SMALL = {"max_tokens": 8, "max_completion_tokens": 8, "max_output_tokens": 8, "n": 2, "best_of": 2}


def specification(model: str) -> dict[str, Any]:
    """The document. Args: model: the served name; OpenAI's are replaced by it."""
    definitions: dict[str, Any] = {}
    posts = {
        "/v1/chat/completions": (completion_create_params.CompletionCreateParamsNonStreaming, ChatCompletion),
        "/v1/completions": (CompletionCreateParamsNonStreaming, types.Completion),
        "/v1/responses": (response_create_params.ResponseCreateParamsNonStreaming, Response),
    }
    paths: dict[str, Any] = {
        path: {"post": _operation(_request(wanted, definitions, model), _schema(answer, definitions))}
        for path, (wanted, answer) in posts.items()
    }
    paths["/v1/models"] = {"get": _operation(None, {"type": "object", "required": ["data", "object"]})}
    paths["/v1/models/{model}"] = {
        "get": {
            **_operation(None, _schema(types.Model, definitions)),
            "parameters": [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}],
        }
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "OpenAI API, the paths served by EaaS", "version": "1"},
        "paths": paths,
        "components": {"schemas": definitions},
    }


def _schema(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    schema = TypeAdapter(kind).json_schema(ref_template="#/components/schemas/{model}", mode="validation")
    definitions.update(schema.pop("$defs", {}))
    return schema


def _request(kind: Any, definitions: dict[str, Any], model: str) -> dict[str, Any]:
    schema = _schema(kind, definitions)
    properties: dict[str, Any] = schema["properties"]
    properties["model"] = {"type": "string", "enum": [model]}
    # Streams are no JSON documents; the tests read them.
    properties["stream"] = {"type": "boolean", "enum": [False]}
    for name, most in _SMALL.items():
        if name in properties:
            properties[name] = {"type": "integer", "minimum": 1, "maximum": most}
    limits = [name for name in ("max_tokens", "max_output_tokens") if name in properties]
    schema["required"] = sorted({*schema.get("required", ()), "model", *limits})
    return schema


def _operation(body: Mapping[str, Any] | None, answer: Mapping[str, Any]) -> dict[str, Any]:
    error = {"description": "An error.", "content": {"application/json": {"schema": _ERROR}}}
    operation: dict[str, Any] = {
        "responses": {
            "200": {"description": "The answer.", "content": {"application/json": {"schema": answer}}},
            **dict.fromkeys(("400", "404", "405", "413", "415", "429", "503"), error),
        }
    }
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    return operation


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", default="demo", help="Served model name.")
    print(json.dumps(specification(options.parse_args().model), indent=1))


if __name__ == "__main__":
    main()
