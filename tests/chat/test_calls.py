"""Parameters keep their blanks, and get the types of the tool's schema: never by guessing, never by `eval`."""

import json
from typing import Any

import pytest

from lego.chat.calls import Lexeme, ParsedCall, json_call, key_value_call, schemas_of, xml_call
from lego.chat.messages import Tool

FIELDS = {
    "old_string": {"type": "string"},
    "count": {"type": "integer"},
    "ratio": {"type": "number"},
    "flag": {"type": "boolean"},
    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "either": {"type": ["integer", "null"]},
    "loose": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
    "nested": {"type": "object"},
    "items": {"type": "array"},
    "named": {"$ref": "#/$defs/Thing"},
    "choice": {"enum": ["1", "2"]},
    "any": {},
}
PARAMETERS = {"type": "object", "properties": FIELDS, "$defs": {"Thing": {"type": "object"}}}
EDIT = Tool("edit", json.dumps({"type": "function", "function": {"name": "edit", "parameters": PARAMETERS}}))
SCHEMAS = schemas_of((EDIT,))


def xml(inside: str) -> ParsedCall | None:
    return xml_call([Lexeme("", f"\n<function=edit>\n{inside}\n</function>\n")], SCHEMAS)


def glm(key: str, value: str) -> ParsedCall | None:
    marks = [("", "edit\n"), ("<arg_key>", key), ("</arg_key>", "\n"), ("<arg_value>", value), ("</arg_value>", "\n")]
    return key_value_call([Lexeme(*mark) for mark in marks], SCHEMAS)


def value(call: ParsedCall | None, key: str) -> Any:
    assert call is not None
    return json.loads(call.arguments)[key]


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        ("\n    if x:\n        return 1\n\n", "    if x:\n        return 1\n"),
        ("\n  two  \n", "  two  "),
        ("\n\t\n", "\t"),
        ("\n\u00a0x\u00a0\n", "\u00a0x\u00a0"),
        ("\n\n", ""),
        ("", ""),
        ("x", "x"),
        ("\n\n\nx\n\n\n", "\n\nx\n\n"),
        ("\n<b>1</b>\n", "<b>1</b>"),
    ],
)
def test_a_value_loses_one_newline_on_each_side_and_nothing_else(raw, text):
    assert value(xml(f"<parameter=old_string>{raw}</parameter>"), "old_string") == text


@pytest.mark.parametrize("text", ["    if x:\n        return 1\n", "two  ", "\t", "\u00a0x", "", "\nx\n"])
def test_a_value_between_glms_marks_loses_nothing(text):
    assert value(glm("old_string", text), "old_string") == text


TYPED = [
    ("count", "5", 5, True),
    ("count", "-7", -7, True),
    ("count", "5.5", "5.5", False),
    ("count", "five", "five", False),
    ("count", "__import__('os')", "__import__('os')", False),
    ("ratio", "0.5", 0.5, True),
    ("ratio", "1e999", "1e999", False),
    ("ratio", "NaN", "NaN", False),
    ("old_string", "5", "5", True),
    ("old_string", "true", "true", True),
    ("old_string", "null", "null", True),
    ("old_string", '{"a": 1}', '{"a": 1}', True),
    ("old_string", "__import__('os')", "__import__('os')", True),
    ("flag", "true", True, True),
    ("flag", "False", False, True),
    ("flag", "yes", "yes", False),
    ("flag", "null", "null", False),
    ("maybe", "null", None, True),
    ("maybe", "None", "None", True),
    ("maybe", "5", "5", True),
    ("either", "null", None, True),
    ("either", "None", None, True),
    ("either", "5", 5, True),
    ("loose", "5", 5, True),
    ("loose", "x", "x", True),
    ("nested", '{"a": [1, {"b": null}]}', {"a": [1, {"b": None}]}, True),
    ("nested", "[1]", "[1]", False),
    ("nested", "{" * 5000, "{" * 5000, False),
    ("items", '[{"a": 1}]', [{"a": 1}], True),
    ("named", '{"a": 1}', {"a": 1}, True),
    ("choice", "1", "1", True),
    ("any", "5", "5", True),
    ("undeclared", "5", "5", True),
]


@pytest.mark.parametrize(("key", "text", "wanted", "valid"), TYPED)
def test_the_schema_decides_the_type(key, text, wanted, valid):
    for call in (xml(f"<parameter={key}>\n{text}\n</parameter>"), glm(key, text)):
        assert value(call, key) == wanted and type(value(call, key)) is type(wanted)
        assert call is not None and call.valid is valid


@pytest.mark.parametrize("field", [7, {"type": [{}, 5]}, {"anyOf": 5}, {"enum": 3}, {"$ref": "#/a/b"}, {"$ref": 1}])
def test_a_schema_that_makes_no_sense_is_no_error(field):
    function = {"name": "edit", "parameters": {"properties": {"a": field}}}
    schemas = schemas_of((Tool("edit", json.dumps({"type": "function", "function": function})),))
    call = xml_call([Lexeme("", "<function=edit><parameter=a>x</parameter>")], schemas)
    assert call is not None and json.loads(call.arguments) == {"a": "x"}


def test_a_parameter_that_is_not_closed_makes_the_call_invalid():
    call = xml("<parameter=count>\n5\n</parameter>\n<parameter=flag>\ntrue")
    assert call == ParsedCall("edit", '{"count": 5}', False)
    half = [Lexeme("", "edit"), Lexeme("<arg_key>", "count"), Lexeme("</arg_key>", "")]
    assert key_value_call(half, SCHEMAS) == ParsedCall("edit", "{}", False)


def test_a_call_without_parameters_has_an_empty_object():
    assert xml("") == ParsedCall("edit", "{}", True)
    assert key_value_call([Lexeme("", "edit")], SCHEMAS) == ParsedCall("edit", "{}", True)


def test_a_call_without_a_name_is_none():
    assert xml_call([Lexeme("", "<function=>")], SCHEMAS) is None
    assert xml_call([Lexeme("", "<function=edit")], SCHEMAS) is None
    assert json_call([Lexeme("", '{"arguments": {}}')], SCHEMAS) is None


def test_json_stays_as_sampled_even_where_a_number_overflows():
    call = json_call([Lexeme("", '{"name": "edit", "arguments": {"":1e400}}')], SCHEMAS)
    assert call == ParsedCall("edit", '{"":1e400}', True)


def test_json_nested_too_deeply_is_an_invalid_call_and_no_error():
    deep = '{"name": "edit", "arguments": ' + '{"a": ' * 20_000
    call = json_call([Lexeme("", deep)], SCHEMAS)
    assert call is not None and not call.valid
