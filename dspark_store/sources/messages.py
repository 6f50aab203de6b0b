"""From the object of one row to messages, tools and calls of them in the one shape that chat templates are given."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn, cast

from dspark_store.format.jsonvalue import JsonValue
from dspark_store.sources.options import check_template_kwargs
from dspark_store.sources.rows import SHAPES_TAKEN, shape_of, without_null_keys
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


ROLES = {
    **{name: name for name in ("system", "developer", "user", "assistant", "tool")},
    "human": "user",
    **dict.fromkeys(("gpt", "chatgpt", "model", "bot"), "assistant"),
    **dict.fromkeys(("function", "observation", "tool_response", "data"), "tool"),
    **dict.fromkeys(("function_call", "tool_call"), "assistant"),  # whose content is the call
}
"""The roles that rows may name, in any case, and what they are to chat templates."""

_CALLING = ("function_call", "tool_call")
_AS_THEY_ARE = frozenset({"tools", "arguments"})  # below these, what a JSON text has may be null


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages of one row, and what else of the row decides its text and its mask.

    Attributes:
        messages: at least one.
        tools: the tools offered in it; None for none.
        supervised: for each message, whether it may be supervised; left out, every message of the assistant is.
        ended: whether the assistant ended its last message by itself, and was not cut off.
        template_kwargs: variables for the chat template; they win over the job's, key by key.

    """

    messages: list[Message]
    tools: list[JsonValue] | None
    supervised: list[bool] = field(default_factory=list)
    ended: bool = True
    template_kwargs: dict[str, JsonValue] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Fill in what is supervised."""
        if not self.supervised:
            self.supervised.extend(message["role"] == "assistant" for message in self.messages)


def read_conversation(row: Mapping[str, JsonValue]) -> Conversation:
    """Read a row in one of `rows.SHAPES`, with what of `rows.BESIDE` it has.

    A key whose value is null is no key, but for what is below `tools` and `arguments`. Contents become strings: the
    text parts of a list joined with one space, `str()` of anything else; a message may have none. Keys that are not
    known here are kept, since a template may know them.

    Raises:
        SourceError: what is wrong, with the path in the row, such as `messages[1].tool_calls[0].id`.

    """
    row = cast("dict[str, JsonValue]", without_null_keys(dict(row), _AS_THEY_ARE))
    shape = shape_of(row)
    if shape is None or shape == ("input_ids",):
        raise SourceError(
            f"the row has neither messages nor conversations; its keys are {sorted(row)}; expected {SHAPES_TAKEN}"
        )
    messages = with_call_ids(_with_system(_of_shape(row, shape), row.get("system")))
    supervised = [_is_supervised(message, f"message {index}") for index, message in enumerate(messages)]
    given = parsed(row.get("chat_template_kwargs", {}))
    template_kwargs = check_template_kwargs(given, "chat_template_kwargs of the row")
    return Conversation(messages, _tools(row.get("tools")), supervised, _has_ended(row), template_kwargs)


def content_of(message: Message) -> str:
    """Return the content of a message; "" if it has none."""
    return str(message.get("content", ""))


def fold_system_message(messages: Sequence[Message], roles: Sequence[str] = ("system",)) -> list[Message]:
    """Put messages of the system in front of the next user message, for templates that refuse their role.

    Where no user message follows one, all stay.
    """
    folded: list[Message] = []
    waiting: list[Message] = []
    for message in messages:
        if message["role"] in roles:
            waiting.append(message)
        elif message["role"] == "user" and waiting:
            folded.append({**message, "content": "\n\n".join(map(content_of, (*waiting, message)))})
            waiting = []
        else:
            folded.append(message)
    return list(messages) if waiting else folded


def _of_shape(row: Mapping[str, JsonValue], shape: tuple[str, ...]) -> list[Message]:
    if len(shape) == 1:
        turns = row[shape[0]]
        if isinstance(turns, str):
            turns = without_null_keys(parsed(turns), _AS_THEY_ARE)
        return _messages(turns, shape[0])
    if shape[0] == "prompt":
        asked, said = shape
        return [*_texts_or_messages(row, asked, "user"), *_texts_or_messages(row, said, "assistant")]
    *asked_in, said = shape
    asking = "\n".join(text for name in asked_in if (text := _text(row.get(name, ""), name)))
    return [{"role": "user", "content": asking}, {"role": "assistant", "content": _text(row[said], said)}]


def _texts_or_messages(row: Mapping[str, JsonValue], name: str, role: str) -> list[Message]:
    value = row[name]
    return [{"role": role, "content": value}] if isinstance(value, str) else _messages(value, name)


def _messages(turns: JsonValue, where: str) -> list[Message]:
    if not isinstance(turns, list) or not turns:
        raise SourceError(f"{where} must be a list of at least one message, got {shown(turns)}")
    return [_message(turn, f"{where}[{index}]") for index, turn in enumerate(turns)]


def _with_system(messages: list[Message], system: JsonValue) -> list[Message]:
    """Return the messages behind what the row says beside them to the system, if they do not begin with it."""
    text = "" if system is None else _text(system, "system")
    if not text.strip():
        return messages
    if messages[0]["role"] != "system":
        return [{"role": "system", "content": text}, *messages]
    if content_of(messages[0]) != text:
        raise SourceError(
            f"system is {shown(text)}, and the conversation begins with another system message, "
            f"{shown(content_of(messages[0]))}; leave one of them out"
        )
    return messages


def _is_supervised(message: Message, where: str) -> bool:
    """Tell whether a message is to be learned from, which rows say by `weight`, `loss` or `train`: 0 or 1."""
    if message["role"] != "assistant":
        return False
    for name in ("weight", "loss", "train"):
        value = message.get(name, 1)
        if not isinstance(value, int | float) or value not in (0, 1):
            raise SourceError(f"{name} of {where} is {shown(value)}; expected 0 or 1")
        if not value:
            return False
    return True


def _has_ended(row: Mapping[str, JsonValue]) -> bool:
    ended = row.get("ended", True)
    if not isinstance(ended, bool):
        raise SourceError(f"ended is {shown(ended)}; expected true or false")
    return ended and row.get("finish_reason") != "length"


def _message(turn: JsonValue, where: str) -> Message:
    if not isinstance(turn, dict):
        raise SourceError(f"{where} must be an object, got {shown(turn)}")
    named = "from" if "from" in turn else "role"
    speaker = turn.get(named)
    spoken = speaker.lower() if isinstance(speaker, str) else ""
    if spoken not in ROLES:
        raise SourceError(f"{where}.{named} is {shown(speaker)}, expected one of {', '.join(ROLES)}")
    message: Message = {**turn, "role": ROLES[spoken]}
    message.pop("from", None)
    if "value" in message:
        message["content"] = message.pop("value")
    if spoken in _CALLING and "content" in message:
        message.setdefault("tool_calls", message.pop("content"))
    if "function_call" in message:  # OpenAI's own form of before there were several
        message.setdefault("tool_calls", [message.pop("function_call")])
    if "content" in message:
        message["content"] = _text(message["content"], f"{where}.content")
    if message["role"] == "assistant":
        if "reasoning_content" in message:
            _check_string(message["reasoning_content"], f"{where}.reasoning_content")
        if "tool_calls" in message:
            message["tool_calls"] = tool_calls(message["tool_calls"], f"{where}.tool_calls")
    call_id = message.get("tool_call_id")
    if message["role"] == "tool" and call_id is not None:
        _check_string(call_id, f"{where}.tool_call_id")
    return message


def _text(content: JsonValue, where: str) -> str:
    if not isinstance(content, list):
        return content if isinstance(content, str) else str(content)
    texts = []
    for index, part in enumerate(content):
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
            texts.append(str(part["text"]))
        else:
            raise SourceError(f"{where}[{index}] must be a part of type 'text', got {shown(part)}")
    return " ".join(texts)


def _check_string(value: JsonValue, where: str) -> None:
    if not isinstance(value, str):
        raise SourceError(f"{where} must be a string or null, got {shown(value)}")


def _tools(tools: JsonValue) -> list[JsonValue] | None:
    if isinstance(tools, str) and tools.strip() and isinstance(parsed(tools), str):
        raise SourceError(f"tools is text but not valid JSON; expected a list, got {shown(tools)}")
    tools = parsed(tools)
    if tools is None or isinstance(tools, str) or tools == []:
        return None
    if not isinstance(tools, list):
        raise SourceError(f"tools must be a list or the JSON text of one, got {shown(tools)}")
    for index, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise SourceError(f"tools[{index}] must be an object, got {shown(tool)}")
    return tools
