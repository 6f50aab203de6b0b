import json

import pytest

from dspark_store.format.jsonvalue import JsonValue
from dspark_store.sources.messages import Message, fold_system_message, read_conversation
from dspark_store.sources.source import SourceError


def messages_of(*messages):
    return read_conversation({"messages": list(messages)}).messages


def call(**fields):
    return {"function": {"name": "f", "arguments": {"x": 1}}, **fields}


def test_contents_become_strings():
    contents = [123, None, True, [{"type": "text", "text": "a"}, {"text": "b"}, "c"], "d"]
    read = messages_of(*({"role": "user", "content": content} for content in contents), {"role": "user"})
    assert [message["content"] for message in read] == ["123", "", "True", "a b c", "d", ""]


def test_an_unknown_role_is_an_error():
    with pytest.raises(SourceError, match=r"messages\[0\]\.role is 'critic', expected one of system, user"):
        messages_of({"role": "critic", "content": "no"})


def test_unknown_keys_are_kept():
    assert messages_of({"role": "user", "content": "a", "name": "n"}) == [{"role": "user", "content": "a", "name": "n"}]


def test_reasoning_and_tool_calls_are_kept_and_nulls_are_left_out():
    assistant, tool, second = messages_of(
        {"role": "assistant", "content": None, "reasoning_content": "why", "tool_calls": [call()]},
        {"role": "tool", "content": None, "tool_call_id": "call_0"},
        {"role": "assistant", "content": "done", "reasoning_content": None},
    )
    assert (assistant["content"], assistant["reasoning_content"]) == ("", "why")
    assert json.loads(assistant["tool_calls"][0]["function"]["arguments"]) == {"x": 1}
    assert tool["content"] == ""
    assert "reasoning_content" not in second


def test_tool_calls_without_id_or_type_get_them():
    (message,) = messages_of({"role": "assistant", "tool_calls": [call(), call(id="", type="")]})
    assert [(made["id"], made["type"]) for made in message["tool_calls"]] == [
        ("call_0", "function"),
        ("call_1", "function"),
    ]


def test_null_tool_calls_are_no_tool_calls():
    assert messages_of({"role": "assistant", "content": "a", "tool_calls": None}) == [
        {"role": "assistant", "content": "a"}
    ]


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"role": "assistant", "reasoning_content": 1}, r"messages\[0\]\.reasoning_content"),
        ({"role": "assistant", "tool_calls": "bad"}, r"messages\[0\]\.tool_calls must be a list"),
        ({"role": "assistant", "tool_calls": ["bad"]}, r"tool_calls\[0\] must be an object"),
        ({"role": "assistant", "tool_calls": [call(), call(id=123)]}, r"messages\[0\]\.tool_calls\[1\]\.id must"),
        ({"role": "assistant", "tool_calls": [call(type=1)]}, r"messages\[0\]\.tool_calls\[0\]\.type must"),
        ({"role": "assistant", "tool_calls": [{"function": None}]}, r"tool_calls\[0\]\.function must"),
        ({"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}, r"function\.name"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}, r"function\.arguments"),
        ({"role": "tool", "content": "a"}, r"messages\[0\]\.tool_call_id"),
        ({"role": "user", "content": [{"type": "image_url"}]}, r"messages\[0\]\.content\[0\] must be a part of type"),
        ("hi", r"messages\[0\] must be an object"),
    ],
)
def test_a_bad_field_is_named(message, field):
    with pytest.raises(SourceError, match=field):
        messages_of(message)


def test_sharegpt_turns_are_mapped():
    turns: list[JsonValue] = [
        {"from": "system", "value": "s"},
        {"from": "human", "value": "u"},
        {"from": "gpt", "value": "a"},
        {"from": "bot"},
        {"from": "tool", "value": "t"},
    ]
    assert read_conversation({"conversations": turns}).messages == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": ""},
        {"role": "tool", "content": "t", "tool_call_id": "call_0"},
    ]


def test_openai_turns_may_stand_under_conversations():
    turns: list[JsonValue] = [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "a", "reasoning_content": "r"},
    ]
    assert read_conversation({"messages": None, "conversations": turns}).messages == turns


@pytest.mark.parametrize("conversations", [[{"from": "function_call", "value": "f"}], {"from": "human"}, ["hi"], []])
def test_bad_sharegpt_turns_are_errors(conversations):
    with pytest.raises(SourceError, match="conversations"):
        read_conversation({"conversations": conversations})


def test_a_row_needs_messages():
    with pytest.raises(SourceError, match=r"neither messages nor conversations; its keys are \['text'\]"):
        read_conversation({"text": "a"})


def test_one_system_message_is_enough():
    with pytest.raises(SourceError, match=r"more than one system message: messages\[0\], messages\[2\]"):
        messages_of({"role": "system"}, {"role": "user"}, {"role": "system"})


@pytest.mark.parametrize(
    ("tools", "expected"),
    [
        ([{"name": "t"}], [{"name": "t"}]),
        ('[{"name": "t"}]', [{"name": "t"}]),
        ([], None),
        ("[]", None),
        ("", None),
        (None, None),
    ],
)
def test_tools_are_a_list_or_its_json_text(tools, expected):
    assert read_conversation({"messages": [{"role": "user"}], "tools": tools}).tools == expected


@pytest.mark.parametrize("tools", [{"name": "t"}, "[not json", '{"name": "t"}', ["t"]])
def test_bad_tools_are_errors(tools):
    with pytest.raises(SourceError, match="tools"):
        read_conversation({"messages": [{"role": "user"}], "tools": tools})


def test_a_system_message_is_folded_into_the_first_user_message():
    system: Message = {"role": "system", "content": "s"}
    user: Message = {"role": "user", "content": "u"}
    answer: Message = {"role": "assistant", "content": "a"}
    assert fold_system_message([system, answer, user]) == [answer, {"role": "user", "content": "s\n\nu"}]
    assert fold_system_message([user, answer]) == [user, answer]
    assert fold_system_message([system, answer]) == [system, answer]
    assert user["content"] == "u"
