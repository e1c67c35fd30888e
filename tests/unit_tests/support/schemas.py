"""Random JSON schemas whose documents are short."""

from __future__ import annotations

import random

WORDS = ("name", "age", "city", "tags", "size", "kind", "note", "id")
MAX_LEVELS = 3


def random_schema(seed: int) -> dict:
    """Random schema with all supported kinds, nested, with definitions that are referred to."""
    source = random.Random(f"schema {seed}")
    definitions = {f"d{i}": _schema(source, MAX_LEVELS - 1, ()) for i in range(source.randrange(3))}
    schema = _object(source, 0, tuple(definitions)) if seed % 3 else _schema(source, 0, tuple(definitions))
    return schema | ({"$defs": definitions} if definitions else {})


def _schema(source: random.Random, level: int, names: tuple[str, ...]) -> dict:
    kinds = [_integer, _number, _string, _choice, _boolean]
    if level < MAX_LEVELS:
        kinds += [_object, _array, _any_of]
    if names:
        kinds.append(lambda source, *_: {"$ref": f"#/$defs/{source.choice(names)}"})
    return source.choice(kinds)(source, level + 1, names)


def _integer(source: random.Random, *_: object) -> dict:
    low = source.randrange(-50, 50)
    bound = source.choice(
        [{"maximum": low + source.randrange(200)}, {"exclusiveMaximum": low + 7, "multipleOf": 3}, {}]
    )
    return {"type": "integer", **({"minimum": low} if source.random() < 0.7 else {}), **bound}


def _number(source: random.Random, *_: object) -> dict:
    low = round(source.uniform(-5, 5), 1)
    return {"type": "number", "minimum": low, "maximum": low + source.choice([0.5, 10, 1000])}


def _string(source: random.Random, *_: object) -> dict:
    min_length = source.randrange(4)
    return source.choice(
        [
            {"type": "string", "minLength": min_length, "maxLength": min_length + source.randrange(8)},
            {
                "type": "string",
                "pattern": source.choice(["^[a-z]{1,6}$", "^(red|green)-[0-9]+$", "^x"]),
                "maxLength": 9,
            },
            {"type": "string", "format": source.choice(["date", "time", "ipv4", "uuid"])},
        ]
    )


def _choice(source: random.Random, *_: object) -> dict:
    values = source.sample(["on", "off", 'a "b"', 3, 2.5, None, True, {"x": [1]}, "ä\n"], source.randrange(1, 5))
    return {"enum": values} if source.random() < 0.7 else {"const": values[0]}


def _boolean(source: random.Random, *_: object) -> dict:
    return {"type": source.choice(["boolean", "null", ["boolean", "null"]])}


def _object(source: random.Random, level: int, names: tuple[str, ...]) -> dict:
    properties = {name: _schema(source, level, names) for name in source.sample(WORDS, source.randrange(1, 5))}
    required = [name for name in properties if source.random() < 0.6]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _array(source: random.Random, level: int, names: tuple[str, ...]) -> dict:
    min_length = source.randrange(3)
    if source.random() < 0.3:
        first = [_schema(source, level, names) for _ in range(2)]
        return {"type": "array", "prefixItems": first, "items": False, "minItems": 2}
    return {"type": "array", "items": _schema(source, level, names), "minItems": min_length, "maxItems": min_length + 2}


def _any_of(source: random.Random, level: int, names: tuple[str, ...]) -> dict:
    return {"anyOf": [_schema(source, level, names) for _ in range(2)]}
