"""Tool calls as models write them: one reader for each spelling, and types by the tool's schema."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import isfinite
from typing import Any, NamedTuple

from lego.chat.messages import Tool

Schemas = Mapping[str, Mapping[str, Any]]
"""JSON schema of the parameters, by tool name."""

_NAME = re.compile(r'"name"\s*:\s*"((?:[^"\\]|\\.)*)"')
_ARGUMENTS = re.compile(r'"(?:arguments|parameters)"\s*:\s*')
_PARAMETER = re.compile(r"<parameter=([^>]+)>(.*?)</parameter>", re.DOTALL)
# Qwen3.5's template writes Python's own words into the history, so its models sample them too.
_PYTHON_WORDS = {"True": True, "False": False, "None": None}


class Lexeme(NamedTuple):
    """A control sequence ("" for none) and the text that follows it, in so many tokens."""

    marker: str
    text: str
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A sampled tool call; `valid` says whether `arguments` are a JSON object of the types that the tool asks for."""

    name: str
    arguments: str
    """As sampled where the model writes JSON; else JSON made of the parameters."""
    valid: bool
    native_id: str = ""
    """The id that the model itself gave the call, where its format has one."""


Reader = Callable[[Sequence[Lexeme], Schemas], ParsedCall | None]
"""Reads the inside of a closed call; None for one without a name, which cannot be delivered."""


def text_of(lexemes: Sequence[Lexeme]) -> str:
    """The text as sampled, control sequences included."""
    return "".join(lexeme.marker + lexeme.text for lexeme in lexemes)


@lru_cache(maxsize=64)
def schemas_of(tools: tuple[Tool, ...]) -> Schemas:
    """The parameter schema of each tool; empty where it has none."""
    found = {tool.name: json.loads(tool.spec)["function"].get("parameters") for tool in tools}
    return {name: schema if isinstance(schema, dict) else {} for name, schema in found.items()}


def json_call(inside: Sequence[Lexeme], schemas: Schemas) -> ParsedCall | None:
    """`{"name": ..., "arguments": {...}}`: the arguments verbatim, not as some serialiser would print them again."""
    raw = text_of(inside).strip()
    found = _loads(raw)
    if not isinstance(found, dict):
        return _broken_json(raw)
    name = found.get("name")
    if not isinstance(name, str) or not name:
        return None
    value = found.get("arguments", found.get("parameters", {}))
    if isinstance(value, str):
        return ParsedCall(name, value, isinstance(_loads(value), dict))
    return ParsedCall(name, _verbatim(raw, value), isinstance(value, dict))


def xml_call(inside: Sequence[Lexeme], schemas: Schemas) -> ParsedCall | None:
    """`<function=NAME>` and `<parameter=KEY>` with the value between newlines, as Qwen3.5 writes them."""
    name, end, body = text_of(inside).partition("<function=")[2].partition(">")
    if not end or not name.strip():
        return None
    # The template puts one newline on each side of a value: all other blanks are the value's own.
    found = [(k, v.removeprefix("\n").removesuffix("\n")) for k, v in _PARAMETER.findall(body)]
    return _typed_call(name.strip(), found, schemas, whole="<parameter=" not in _PARAMETER.sub("", body))


def key_value_call(inside: Sequence[Lexeme], schemas: Schemas) -> ParsedCall | None:
    """A name, then `<arg_key>` and `<arg_value>` pairs, as GLM writes them."""
    name = inside[0].text.strip()
    pairs = list(_pairs(inside[1:]))
    found = [(key.strip(), value) for key, value in pairs if value is not None]
    return _typed_call(name, found, schemas, whole=len(found) == len(pairs)) if name else None


def fenced_call(inside: Sequence[Lexeme], schemas: Schemas) -> ParsedCall | None:
    """`function<sep>NAME` and JSON in a fence, as DeepSeek V3 and R1 write it, or V3.1's `NAME<sep>JSON`."""
    kind, rest = inside[0].text.strip(), _after_mark(inside)
    if kind != "function":
        return _verbatim_call(kind, rest)
    name, _, fenced = rest.strip().partition("\n")
    arguments = fenced.strip().removeprefix("```").removeprefix("json").removesuffix("```")
    return _verbatim_call(name.strip(), arguments)


def kimi_call(inside: Sequence[Lexeme], schemas: Schemas) -> ParsedCall | None:
    """`functions.NAME:NUMBER`, which is the call's id, then JSON."""
    native = inside[0].text.strip()
    name = native.split(":", 1)[0].removeprefix("functions.")
    return _verbatim_call(name, _after_mark(inside), native)


def harmony_call(inside: Sequence[Lexeme], schemas: Schemas) -> ParsedCall | None:
    """A message's header with `to=NAME`, then JSON."""
    name = recipient(inside[0].text) or ""
    return _verbatim_call(name.removeprefix("functions."), inside[1].text)


def recipient(header: str) -> str | None:
    """Whom a harmony message is for; None if for the user."""
    found = re.search(r"to=([^\s<]+)", header)
    return found[1] if found else None


def _verbatim_call(name: str, arguments: str, native_id: str = "") -> ParsedCall | None:
    text = arguments.strip() or "{}"
    return ParsedCall(name, text, isinstance(_loads(text), dict), native_id) if name else None


def _after_mark(inside: Sequence[Lexeme]) -> str:
    """The text after the first mark."""
    return text_of(inside[1:]).removeprefix(inside[1].marker) if len(inside) > 1 else ""


def _pairs(lexemes: Sequence[Lexeme]) -> Iterator[tuple[str, str | None]]:
    """Keys with the value that follows, None where it is missing or not closed."""
    for i, lexeme in enumerate(lexemes):
        if lexeme.marker == "<arg_key>":
            marks = [other.marker for other in lexemes[i + 1 : i + 4]]
            whole = marks == ["</arg_key>", "<arg_value>", "</arg_value>"]
            yield lexeme.text, lexemes[i + 2].text if whole else None


def _typed_call(name: str, found: Sequence[tuple[str, str]], schemas: Schemas, *, whole: bool) -> ParsedCall:
    schema = schemas.get(name, {})
    properties = schema.get("properties")
    fields = properties if isinstance(properties, dict) else {}
    typed = {key: typed_value(text, _kinds(fields.get(key), schema)) for key, text in found}
    try:
        arguments = json.dumps({key: value for key, (value, _) in typed.items()}, ensure_ascii=False)
    except RecursionError:
        return ParsedCall(name, json.dumps(dict(found), ensure_ascii=False), False)
    return ParsedCall(name, arguments, whole and all(fits for _, fits in typed.values()))


def typed_value(text: str, kinds: frozenset[str]) -> tuple[Any, bool]:
    """The value that the text spells if one of these JSON types fits it, else the text; and whether that fits."""
    if not kinds - {"string"}:
        return text, True
    value = _PYTHON_WORDS.get(text.strip(), _MISSING) if "string" not in kinds else _MISSING
    # What overflows could not be printed as JSON again.
    value = _loads(text, _finite) if value is _MISSING else value
    if value is not _MISSING and _kind(value) & kinds:
        return value, True
    return text, "string" in kinds


_MISSING = object()


def _kind(value: Any) -> frozenset[str]:
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, int | float):
        whole = isinstance(value, int) or value.is_integer()
        return frozenset({"integer", "number"}) if whole else frozenset({"number"})
    names = {dict: "object", list: "array", str: "string", type(None): "null"}
    return frozenset({names[type(value)]})


def _kinds(field: Any, root: Mapping[str, Any], depth: int = 8) -> frozenset[str]:
    """The JSON types that a field's schema allows; none if it names none."""
    if not isinstance(field, dict) or not depth:
        return frozenset()
    kinds = {kind for kind in _listed(field.get("type")) if isinstance(kind, str)}
    if not kinds:
        values = [*_listed(field.get("enum", [])), *([field["const"]] if "const" in field else [])]
        kinds = {kind for value in values for kind in _kind(value)}
    branches = [b for word in ("anyOf", "oneOf", "allOf") if word in field for b in _listed(field[word])]
    return frozenset(kinds).union(*(_kinds(b, root, depth - 1) for b in [*branches, _target(field, root)]))


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _target(field: Mapping[str, Any], root: Mapping[str, Any]) -> Any:
    """What a local `$ref` points at."""
    found: Any = root
    for part in str(field.get("$ref", "")).split("/")[1:]:
        found = found.get(part) if isinstance(found, dict) else None
    return found if "$ref" in field else None


def _broken_json(raw: str) -> ParsedCall | None:
    name, start = _NAME.search(raw), _ARGUMENTS.search(raw)
    if not name or not start:
        return None
    return ParsedCall(name[1], raw[start.end() :].removesuffix("}").strip(), False)


def _verbatim(raw: str, value: Any) -> str:
    for match in reversed(list(_ARGUMENTS.finditer(raw))):
        try:
            found, end = json.JSONDecoder().raw_decode(raw, match.end())
        except (ValueError, RecursionError):
            continue
        if found == value:
            return raw[match.end() : end]
    return json.dumps(value, ensure_ascii=False)


def _loads(text: str, number: Callable[[str], float] = float) -> Any:
    """The JSON value of a text, or `_MISSING`."""
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=number)
    except (ValueError, RecursionError):
        return _MISSING


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    return float(text) if isfinite(float(text)) else _refuse(text)
