"""Requests made up from the server's own OpenAPI document never end in a server error.

Each request follows the schema of its route, except that any value may be replaced by a hostile
one. The seed is fixed, so a failure repeats; `--rounds 25` makes up 10,000 requests.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from tests.contract.hostile import PLAIN, VALUES
from tests.serving import Serving

CASES = 400
WORDS = ["tiny-random", "hostile", "contract", "contract~hostile", "user", "text", "auto", "x", "1"]
SEGMENTS = [
    "hostile",
    "contract~hostile",
    "contract~hostile~0",
    "tiny-random",
    "²",
    "%00",
    "9" * 99,
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, art_cache: str) -> Iterator[Serving]:
    directory: Path = tmp_path_factory.mktemp("fuzz")
    with Serving(directory, "tiny-random", ART_CACHE=art_cache) as serving:
        serving.post("/register", PLAIN)
        serving.post("/_prepare_backend_for_training", {"model": PLAIN})
        yield serving


class Maker:
    """Makes up JSON that follows a schema, more or less."""

    def __init__(self, seed: int, definitions: Any) -> None:
        self.random = random.Random(seed)
        self._definitions = definitions

    def text(self, schema: Any, depth: int = 0) -> str:
        """A piece of JSON, as text: hostile values include what no encoder writes."""
        if self.random.random() < 0.05 or depth > 6:
            return self.random.choice(VALUES)
        if reference := schema.get("$ref"):
            return self.text(self._definitions[reference.rpartition("/")[2]], depth)
        if kinds := schema.get("anyOf") or schema.get("oneOf"):
            return self.text(self.random.choice(kinds), depth + 1)
        if "const" in schema or "enum" in schema:
            return json.dumps(self.random.choice(schema.get("enum") or [schema.get("const")]))
        match schema.get("type"):
            case "object":
                return self._object(schema, depth)
            case "array":
                items = [schema.get("items") or {}] * self.random.randrange(3)
                return f"[{', '.join(self.text(item, depth + 1) for item in items)}]"
            case "string":
                return json.dumps(self.random.choice(WORDS))
            case "integer" | "number":
                return str(self.random.choice([0, 1, 2, 7, 0.5, -1]))
            case "boolean":
                return self.random.choice(["true", "false"])
            case "null":
                return "null"
        return self.random.choice([*VALUES, *map(json.dumps, WORDS)])

    def _object(self, schema: Any, depth: int) -> str:
        required = schema.get("required") or ()
        fields = {
            name: part
            for name, part in (schema.get("properties") or {}).items()
            if name in required or self.random.random() < 0.3
        }
        if schema.get("additionalProperties") and self.random.random() < 0.5:
            fields[self.random.choice([*WORDS, "self", "role", "content", "type"])] = {}
        items = (f"{json.dumps(key)}: {self.text(part, depth + 1)}" for key, part in fields.items())
        return "{" + ", ".join(items) + "}"


def test_requests_made_up_from_the_schema_are_never_server_errors(
    server: Serving, rounds: int
) -> None:
    with httpx.Client(base_url=server.openai, timeout=120) as client:
        document = client.get("/openapi.json").json()
        maker = Maker(7, document["components"]["schemas"])
        operations = [
            (method, path, operation)
            for path, methods in document["paths"].items()
            for method, operation in methods.items()
            if path != "/api/events"  # a stream without an end
        ]
        for number in range(CASES * rounds):
            method, path, operation = operations[number % len(operations)]
            for parameter in operation.get("parameters") or ():
                if parameter["in"] == "path":
                    segment = quote(maker.random.choice(SEGMENTS), safe="%")
                    path = path.replace("{" + parameter["name"] + "}", segment)
            query = {
                parameter["name"]: maker.text(parameter["schema"]).strip('"')[:200]
                for parameter in operation.get("parameters") or ()
                if parameter["in"] == "query" and maker.random.random() < 0.5
            }
            path = path.replace("{name}", "x").replace("{rollout}", "fuzz")
            content = operation.get("requestBody", {}).get("content", {})
            body = maker.text(content["application/json"]["schema"]) if content else ""
            answer = client.request(
                *(method, path),
                params={key: value.encode("utf-8", "replace") for key, value in query.items()},
                content=body.encode("utf-8", "surrogatepass"),
                headers={"Content-Type": "application/json"} if body else {},
            )
            case = (number, method, path, query, body[:1000], answer.text)
            assert answer.status_code < 500, case
            if answer.status_code >= 400:
                assert answer.json()["error"]["message"], case


def test_the_document_describes_the_body_of_every_post(server: Serving) -> None:
    paths = httpx.get(f"{server.openai}/openapi.json", timeout=60).json()["paths"]
    without = {"/close", "/api/login-token"}
    missing = [
        path
        for path, methods in paths.items()
        if "post" in methods and "requestBody" not in methods["post"] and path not in without
    ]
    assert missing == []
    assert "digest" not in json.dumps(paths["/_train_model"])
