"""Values that a JSON schema admits, at its bounds as often as not; of the OpenAPI document that the router serves."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

from loadtest.fuzz.noise import text, tree

_SURROGATE = "\ud800"


class Schemas:
    """`own`: values by the name of a property that must often be one of these, so that more than the gate is tried."""

    def __init__(self, document: Mapping[str, Any], own: Mapping[str, tuple[Any, ...]]) -> None:
        self._components: Mapping[str, Any] = document["components"]["schemas"]
        self._own = own

    def of(self, rng: Random, schema: Mapping[str, Any], depth: int = 6) -> Any:
        if "$ref" in schema:
            return self.of(rng, self._components[schema["$ref"].rpartition("/")[2]], depth)
        if "anyOf" in schema:
            return self.of(rng, rng.choice(schema["anyOf"]), depth)
        if "enum" in schema:
            return rng.choice(schema["enum"])
        if "const" in schema:
            return schema["const"]
        match schema.get("type"):
            case "object":
                return self._object(rng, schema, depth)
            case "array":
                return self._array(rng, schema, depth)
            case "string":
                return _string(rng, schema)
            case "integer":
                return _bounded(rng, schema, whole=True)
            case "number":
                return _bounded(rng, schema, whole=False)
            case "boolean":
                return rng.random() < 0.5
            case "null":
                return None
        return tree(rng, False, 2)

    def _object(self, rng: Random, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        needed = schema.get("required", ())
        found = {}
        for name, inner in schema.get("properties", {}).items():
            if name not in needed and rng.random() > 0.12:
                continue
            own = self._own.get(name)
            found[name] = rng.choice(own) if own and rng.random() < 0.9 else self.of(rng, inner, depth - 1)
        others = schema.get("additionalProperties")
        if isinstance(others, Mapping) and depth > 0:
            for _ in range(_length(rng, schema, "minProperties", "maxProperties")):
                key = str(rng.randrange(300)) if rng.random() < 0.8 else text(rng)
                found[key] = self.of(rng, others, depth - 1)
        return found

    def _array(self, rng: Random, schema: Mapping[str, Any], depth: int) -> list[Any]:
        items = schema.get("items", {})
        return [self.of(rng, items, depth - 1) for _ in range(_length(rng, schema, "minItems", "maxItems"))]


def _length(rng: Random, schema: Mapping[str, Any], least: str, most: str) -> int:
    low, high = schema.get(least, 0), schema.get(most, 4)
    if rng.random() < 0.03:
        return int(min(rng.choice((high, high + 1)), 5000))
    return int(rng.randrange(low, min(high, low + 3) + 1))


def _string(rng: Random, schema: Mapping[str, Any]) -> str:
    low, high = schema.get("minLength", 0), min(schema.get("maxLength", 20_000), 20_000)
    if rng.random() < 0.05:
        return "x" * int(rng.choice((low, max(low - 1, 0), high, high + 1)))
    return _SURROGATE if rng.random() < 0.01 else str(text(rng)) or "x" * int(low)


def _bounded(rng: Random, schema: Mapping[str, Any], *, whole: bool) -> Any:
    low = schema.get("minimum", schema.get("exclusiveMinimum", -(1 << 62)))
    high = schema.get("maximum", schema.get("exclusiveMaximum", 1 << 62))
    if rng.random() < 0.2:
        return rng.choice((low, high, low, high, low - 1, high + 1))
    if whole:
        return rng.randint(int(low), min(int(high), int(low) + 20))
    return rng.uniform(low, high) if high - low < 1e9 else rng.uniform(-1, 1)
