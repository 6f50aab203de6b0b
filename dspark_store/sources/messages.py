"""From the object of one row to messages and tools in the one shape that chat templates are given."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dspark_store.format.jsonvalue import JsonValue
from dspark_store.sources.source import SourceError

type Message = dict[str, JsonValue]

ROLES = ("system", "user", "assistant", "tool")
SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "tool": "tool",
}


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
    """Read a row in OpenAI's shape (`messages`, optional `tools`) or in ShareGPT's (`conversations`).

    Contents become strings: the text parts of a list joined with one space, "" for null, `str()` of anything else.
    Keys that are not known here are kept, since a template may know them; null is the same as no key.

    Raises:
        SourceError: what is wrong, with the path in the row, such as `messages[1].tool_calls[0].id`.

    """
    turns, field = row.get("messages"), "messages"
    if turns is None:
        turns, field = row.get("conversations"), "conversations"
    if turns is None:
        raise SourceError(f"the row has neither messages nor conversations; its keys are {sorted(row)}")
    if not isinstance(turns, list) or not turns:
        raise SourceError(f"{field} must be a list of at least one message, got {_shown(turns)}")
    messages = []
    for index, turn in enumerate(turns):
        where = f"{field}[{index}]"
        if not isinstance(turn, dict):
            raise SourceError(f"{where} must be an object, got {_shown(turn)}")
        messages.append(_normalised(turn if field == "messages" else _from_sharegpt(turn, where), where))
    systems = [f"{field}[{index}]" for index, message in enumerate(messages) if message["role"] == "system"]
    if len(systems) > 1:
        raise SourceError(f"more than one system message: {', '.join(systems)}")
    return Conversation(messages, _tools(row.get("tools")))


def fold_system_message(messages: Sequence[Message]) -> list[Message]:
    """Put a leading system message in front of the first user message, for templates that refuse the system role."""
    if not messages or messages[0]["role"] != "system":
        return list(messages)
    folded = [dict(message) for message in messages[1:]]
    for message in folded:
        if message["role"] == "user":
            message["content"] = f"{messages[0]['content']}\n\n{message['content']}"
            return folded
    return list(messages)


def _from_sharegpt(turn: Message, where: str) -> Message:
    speaker = turn["from"] if turn.get("from") is not None else turn.get("role")
    if not isinstance(speaker, str) or speaker not in SHAREGPT_ROLES:
        raise SourceError(f"{where}: unknown speaker {_shown(speaker)}, expected one of {', '.join(SHAREGPT_ROLES)}")
    content = turn["value"] if turn.get("value") is not None else turn.get("content")
    rest = {key: value for key, value in turn.items() if key not in ("from", "value")}
    if speaker == "tool" and not rest.get("tool_call_id"):
        rest["tool_call_id"] = "call_0"  # ShareGPT has no ids: a result answers the call before it
    return {**rest, "role": SHAREGPT_ROLES[speaker], "content": content}


def _normalised(turn: Message, where: str) -> Message:
    role = turn.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise SourceError(f"{where}.role is {_shown(role)}, expected one of {', '.join(ROLES)}")
    message = {**turn, "content": _text(turn.get("content"), f"{where}.content")}
    if role == "assistant":
        for field in ("reasoning_content", "tool_calls"):
            if message.get(field) is None:
                message.pop(field, None)  # null is what columnar files hold in messages that have none
        if "reasoning_content" in message:
            _check_string(message["reasoning_content"], f"{where}.reasoning_content")
        if "tool_calls" in message:
            message["tool_calls"] = _tool_calls(message["tool_calls"], f"{where}.tool_calls")
    if role == "tool":
        call_id = turn.get("tool_call_id")
        if not isinstance(call_id, str) or not call_id:
            raise SourceError(f"{where}.tool_call_id must be a non-empty string, got {_shown(call_id)}")
    return message


def _text(content: JsonValue, where: str) -> str:
    if content is None:
        return ""
    if not isinstance(content, list):
        return content if isinstance(content, str) else str(content)
    texts = []
    for index, part in enumerate(content):
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
            texts.append(str(part["text"]))
        else:
            raise SourceError(f"{where}[{index}] must be a part of type 'text', got {_shown(part)}")
    return " ".join(texts)


def _check_string(value: JsonValue, where: str) -> None:
    if not isinstance(value, str):
        raise SourceError(f"{where} must be a string or null, got {_shown(value)}")


def _tool_calls(calls: JsonValue, where: str) -> list[JsonValue]:
    if not isinstance(calls, list):
        raise SourceError(f"{where} must be a list or null, got {_shown(calls)}")
    return [_tool_call(call, index, f"{where}[{index}]") for index, call in enumerate(calls)]


def _tool_call(call: JsonValue, index: int, where: str) -> JsonValue:
    if not isinstance(call, dict):
        raise SourceError(f"{where} must be an object, got {_shown(call)}")
    function = call.get("function")
    if not isinstance(function, dict):
        raise SourceError(f"{where}.function must be an object, got {_shown(function)}")
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str) or not name:
        raise SourceError(f"{where}.function.name must be a non-empty string, got {_shown(name)}")
    if arguments is None:
        raise SourceError(f"{where}.function.arguments is missing; expected an object or its JSON text")
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {
        **call,
        "id": _string_or(f"call_{index}", call.get("id"), f"{where}.id"),
        "type": _string_or("function", call.get("type"), f"{where}.type"),
        "function": {**function, "arguments": arguments},
    }


def _string_or(default: str, value: JsonValue, where: str) -> str:
    if value is None:
        return default
    if not isinstance(value, str):
        raise SourceError(f"{where} must be a string, got {_shown(value)}")
    return value or default


def _tools(tools: JsonValue) -> list[JsonValue] | None:
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise SourceError(f"tools is text but not valid JSON ({error}); expected a list") from error
    if tools is None or tools in ("", []):
        return None
    if not isinstance(tools, list):
        raise SourceError(f"tools must be a list or the JSON text of one, got {_shown(tools)}")
    for index, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise SourceError(f"tools[{index}] must be an object, got {_shown(tool)}")
    return tools


def _shown(value: JsonValue, limit: int = 60) -> str:
    text = "null" if value is None else repr(value)
    return text if len(text) <= limit else f"{text[:limit]}..."
