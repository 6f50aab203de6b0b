"""Tool calls as templates write them: what transformers gives for the row whose arguments are an object."""

import json

import pytest

from dspark_store.sources import ChatSource
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


def test_the_arguments_are_what_a_template_writes_and_not_their_text(tmp_path):
    path = write_rows(tmp_path / "chats.jsonl", {"messages": chat('{"city": "K\\u00f6ln"}')})
    ((whole, _),) = texts(path, CALLS.replace("CALL", '{"arguments": {{ f.arguments | tojson }}}'))
    assert '<|im_start|>assistant\n{"arguments": {"city": "Köln"}}<|im_end|>\n' in whole


def test_arguments_that_are_no_json_object_stay_text(tmp_path):
    path = write_rows(tmp_path / "chats.jsonl", {"messages": chat("Köln, please")})
    ((whole, _),) = texts(path, CALLS.replace("CALL", TEMPLATES["arguments as JSON"]))
    assert '<|im_start|>assistant\nf"Köln, please"<|im_end|>\n' in whole


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
