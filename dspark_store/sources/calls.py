"""Tool calls, in the one form that chat templates are given, and whose result a message is."""

import json
from collections.abc import Sequence
from typing import NoReturn

from dspark_store.format.jsonvalue import JsonValue
from dspark_store.sources.source import SourceError

type Message = dict[str, JsonValue]


def shown(value: JsonValue, limit: int = 60) -> str:
    """Return a value for a message, cut short."""
    text = "null" if value is None else repr(value)
    return text if len(text) <= limit else f"{text[:limit]}..."


def parsed(text: JsonValue) -> JsonValue:
    """Return what a JSON text holds; the text itself if it is none, or has NaN or the like. Other values stay."""
    if not isinstance(text, str):
        return text
    try:
        value: JsonValue = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return text
    return value


def tool_calls(calls: JsonValue, where: str) -> list[JsonValue]:
    """Return the calls as objects of `id`, `type` and `function`, whose `arguments` are an object where they can be.

    A call may be flat (`name` and `arguments`), and `calls` the JSON text of a list or of one call.

    Raises:
        SourceError: what is wrong, with its place.

    """
    calls = parsed(calls)
    if isinstance(calls, dict):
        calls = [calls]
    if not isinstance(calls, list):
        raise SourceError(f"{where} must be a list or null, got {shown(calls)}")
    return [_tool_call(call, index, f"{where}[{index}]") for index, call in enumerate(calls)]


def with_call_ids(messages: Sequence[Message]) -> list[Message]:
    """Return the messages, each result that names no call being one of the calls before it, in their order."""
    named = []
    waiting: list[str] = []
    for message in messages:
        calls = message.get("tool_calls")
        if isinstance(calls, list) and calls:
            waiting = [str(call["id"]) for call in calls if isinstance(call, dict)]
        if message["role"] == "tool":
            if not message.get("tool_call_id"):
                message = {**message, "tool_call_id": waiting[0] if waiting else "call_0"}  # noqa: PLW2901
            if message["tool_call_id"] in waiting:
                waiting.remove(str(message["tool_call_id"]))
        named.append(message)
    return named


def _tool_call(call: JsonValue, index: int, where: str) -> JsonValue:
    call = parsed(call)
    if not isinstance(call, dict):
        raise SourceError(f"{where} must be an object, got {shown(call)}")
    function = call.get("function")
    if not isinstance(function, dict) and isinstance(call.get("name"), str):  # flat
        function = {key: call[key] for key in ("name", "arguments") if key in call}
        call = {key: value for key, value in call.items() if key not in ("name", "arguments")}
    if not isinstance(function, dict):
        raise SourceError(f"{where}.function must be an object, got {shown(function)}")
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str) or not name:
        raise SourceError(f"{where}.function.name must be a non-empty string, got {shown(name)}")
    if arguments is None:
        raise SourceError(f"{where}.function.arguments is missing; expected an object or its JSON text")
    held = parsed(arguments)
    return {
        **call,
        "id": _string_or(f"call_{index}", call.get("id"), f"{where}.id"),
        "type": _string_or("function", call.get("type"), f"{where}.type"),
        "function": {**function, "arguments": held if isinstance(held, dict) else arguments},
    }


def _string_or(default: str, value: JsonValue, where: str) -> str:
    if value is None:
        return default
    if not isinstance(value, str):
        raise SourceError(f"{where} must be a string, got {shown(value)}")
    return value or default


def _no_number(name: str) -> NoReturn:
    raise ValueError(name)
