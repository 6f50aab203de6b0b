import json
from typing import Any

import pytest

from dspark_store.format.jsonvalue import JsonValue
from dspark_store.sources import ChatSource
from dspark_store.sources.messages import Message, fold_system_message, read_conversation
from dspark_store.sources.source import SourceError
from tests.sources.shapes import SHAPES
from tests.sources.words import write_rows

EACH = "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}{%- if m.content %}{{- m.content }}{%- endif %}"
END = "{{- '<|im_end|>\n' }}{%- endfor %}"
PROMPT = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
CALLS = EACH + "{%- for c in m.tool_calls or [] %}{%- set f = c.function %}CALL{%- endfor %}" + END + PROMPT
TEMPLATES = {
    "arguments as JSON": "{{- f.name }}{{- f.arguments | tojson }}",
    "the function as JSON": "{{- f | tojson }}",
    "items": "{%- for k, v in f.arguments.items() %}{{- k }}={{- v | tojson }};{%- endfor %}",
    "text or object": "{{- f.arguments if f.arguments is string else f.arguments | tojson }}",
}
ARGUMENTS = {"city": "Köln", "days": [1, None], "unit": None, "deep": {"a": 1.5, "b": None}}


def tokenizer(template):
    made = SHAPES[0].tokenizer(tagged=False)
    made.chat_template = template
    return made


def texts(data, template, **options):
    made = tokenizer(template)
    source = ChatSource(data, made, seq_length=4000, **options)
    return [(made.decode(s.input_ids), made.decode(s.input_ids[s.loss_mask == 1])) for s in source.read()]


def chat(arguments):
    call = {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [
        {"role": "user", "content": "q"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_0", "content": "r"},
        {"role": "assistant", "content": "a"},
    ]


@pytest.mark.parametrize("call", TEMPLATES.values(), ids=TEMPLATES)
def test_an_object_and_the_json_text_of_it_are_what_transformers_gives_for_the_object(tmp_path, call):
    template = CALLS.replace("CALL", call)
    rows = [{"messages": chat(ARGUMENTS)}, {"messages": chat(json.dumps(ARGUMENTS))}]
    expected = tokenizer(template).apply_chat_template(chat(ARGUMENTS), tokenize=False)
    (_, one), (_, other) = read = texts(write_rows(tmp_path / "chats.jsonl", *rows), template)
    assert [whole for whole, _ in read] == [expected, expected]
    assert one == other
    assert one.endswith("<|im_start|>assistant\na<|im_end|>\n")


@pytest.mark.parametrize("content", [{}, {"content": None}], ids=["none", "null"])
def test_a_message_without_content_has_none_for_the_template_as_in_transformers(tmp_path, content):
    template = EACH + "{{- '(none)' if m.content is not defined }}" + END + PROMPT
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", **content}]
    ((whole, said),) = texts(write_rows(tmp_path / "chats.jsonl", {"messages": messages}), template)
    assert whole == tokenizer(template).apply_chat_template(messages, tokenize=False)
    assert said == "<|im_start|>assistant\n(none)<|im_end|>\n"


def test_a_template_that_cannot_do_without_content_is_given_an_empty_one(tmp_path):
    template = "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' + m.content }}" + END + PROMPT
    ((_, said),) = texts(write_rows(tmp_path / "chats.jsonl", {"messages": chat({})}), template)
    assert said == "<|im_start|>assistant\n<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"


def messages_of(*messages):
    return read_conversation({"messages": list(messages)}).messages


def call(**fields):
    return {"function": {"name": "f", "arguments": {"x": 1}}, **fields}


def test_contents_become_strings():
    contents = [123, True, [{"type": "text", "text": "a"}, {"text": "b"}, "c"], "d", ""]
    read = messages_of(*({"role": "user", "content": content} for content in contents))
    assert [message["content"] for message in read] == ["123", "True", "a b c", "d", ""]


def test_keys_that_are_null_are_no_keys_but_below_tools_and_arguments():
    function = {"name": "f", "arguments": {"x": None}, "strict": None}
    call = {"id": None, "function": function, "index": None}
    row: dict[str, Any] = {
        "messages": [
            {"role": "user", "content": None, "name": None, "mood": "m", "tool_calls": None},
            {"role": "assistant", "content": [{"type": "text", "text": "a", "image_url": None}], "tool_calls": [call]},
        ],
        "tools": [{"name": "f", "default": None}],
    }
    read = read_conversation(row)
    assert read.messages == [
        {"role": "user", "mood": "m"},
        {
            "role": "assistant",
            "content": "a",
            "tool_calls": [{"function": {"name": "f", "arguments": {"x": None}}, "id": "call_0", "type": "function"}],
        },
    ]
    assert read.tools == [{"name": "f", "default": None}]


def test_tool_calls_without_id_or_type_get_them():
    (message,) = messages_of({"role": "assistant", "tool_calls": [call(), call(id="", type="")]})
    made = [(made["id"], made["type"]) for made in message["tool_calls"]]
    assert made == [("call_0", "function"), ("call_1", "function")]


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
        ({"role": "tool", "content": "a", "tool_call_id": 7}, r"messages\[0\]\.tool_call_id"),
        ({"role": "function_call", "content": "none"}, r"messages\[0\]\.tool_calls must be a list .*'none'"),
        ({"role": "user", "content": [{"type": "image_url"}]}, r"messages\[0\]\.content\[0\] must be a part of type"),
        ({"role": 1}, r"messages\[0\]\.role is 1"),
        ({"role": "critic"}, r"messages\[0\]\.role is 'critic', expected one of system, developer, user"),
        ("hi", r"messages\[0\] must be an object"),
    ],
)
def test_a_bad_field_is_named(message, field):
    with pytest.raises(SourceError, match=field):
        messages_of(message)


def test_sharegpt_turns_are_mapped():
    turns: list[JsonValue] = [
        {"role": "system", "content": "s"},
        {"from": "human", "value": "u"},
        {"from": "gpt", "value": "a"},
        {"from": "bot"},
        {"from": "tool", "value": "t"},
    ]
    assert read_conversation({"conversations": turns}).messages == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "a"},
        {"role": "assistant"},
        {"role": "tool", "content": "t", "tool_call_id": "call_0"},
    ]


@pytest.mark.parametrize("conversations", [[{"from": "critic", "value": "f"}], {"from": "human"}, []])
def test_bad_sharegpt_turns_are_errors(conversations):
    with pytest.raises(SourceError, match="conversations"):
        read_conversation({"conversations": conversations})


def test_roles_go_by_other_names_in_any_case():
    others = ["Human", "GPT", "Assistant", "function", "observation", "tool_response", "data", "developer", "system"]
    roles = [message["role"] for message in messages_of(*({"role": role, "content": "a"} for role in others))]
    assert roles == ["user", "assistant", "assistant", *["tool"] * 4, "developer", "system"]


@pytest.mark.parametrize(
    "turn",
    [
        {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
        {"from": "tool_call", "value": '[{"name": "f", "arguments": "{\\"x\\": 1}"}]'},
        {"role": "tool_call", "content": {"name": "f", "arguments": {"x": 1}}},
        {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"x": 1}}]},
        {"role": "assistant", "tool_calls": '[{"type": "function", "name": "f", "arguments": {"x": 1}}]'},
        {"role": "assistant", "function_call": {"name": "f", "arguments": '{"x": 1}'}},
    ],
)
def test_every_form_of_a_call_is_one(turn):
    made = {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    assert read_conversation({"conversations": [turn]}).messages == [{"role": "assistant", "tool_calls": [made]}]


@pytest.mark.parametrize("text", ["", "go", "[1]", "3", "{", '{"a": NaN}', "{" * 100_000])
def test_arguments_that_are_no_json_object_stay_text(text):
    (message,) = messages_of({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": text}}]})
    assert message["tool_calls"][0]["function"]["arguments"] == text


def test_results_without_an_id_answer_the_calls_before_them_in_their_order():
    calls = {"role": "assistant", "tool_calls": [call(id="a"), call(id="b"), call(id="c")]}
    results = [{"role": "tool"}, {"role": "tool", "tool_call_id": "c"}, {"role": "tool"}]
    read = messages_of({"role": "tool"}, calls, *results)
    assert [message.get("tool_call_id") for message in read] == ["call_0", None, "a", "c", "b"]


def test_messages_may_be_json_text():
    row: dict[str, JsonValue] = {"messages": '[{"role": "user", "content": "a", "name": null}]', "tools": "[]"}
    assert read_conversation(row).messages == [{"role": "user", "content": "a"}]


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
    assert fold_system_message([system, system, user, system, user]) == [
        {"role": "user", "content": "s\n\ns\n\nu"},
        {"role": "user", "content": "s\n\nu"},
    ]
    assert user["content"] == "u"
