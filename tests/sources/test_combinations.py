"""Templates and rows that were thought of by somebody who had not read the code, with the masks written down before."""

import pytest

from dspark_store.sources.messages import read_conversation
from dspark_store.sources.rendering import Renderer
from dspark_store.sources.source import SourceError
from tests.sources.templates import CHATML, byte_tokenizer, shown

# Nothing closes the last message.
OPEN_END = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{% if not loop.last %}{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
)
# Thoughts of earlier answers go, and what asks for an answer asks for a thought.
THOUGHTS_GO = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '<U>' + m.content }}{% else %}"
    "{% set c = m.content %}{% if '</think>' in c and not loop.last %}{% set c = c.split('</think>')[-1] %}{% endif %}"
    "{{ '<A>' + c + eos_token }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<A><think>\n' }}{% endif %}"
)
THOUGHT = "<think>\nw\n</think>\n\n"


def user(content):
    return {"role": "user", "content": content}


def said(content=None, **more):
    return {"role": "assistant", **({} if content is None else {"content": content}), **more}


def marked(renderer, row, **options):
    """Return the text of a row with `[[` and `]]` around what is supervised."""
    chat = read_conversation(row)
    return shown(renderer, chat.messages, chat.tools, supervised=chat.supervised, ended=chat.ended, **options)


@pytest.mark.parametrize("template", [OPEN_END, THOUGHTS_GO], ids=["open end", "thoughts go"])
def test_a_mask_does_not_depend_on_the_rows_before(template):
    rows = [
        [user("q"), said(THOUGHT), user(";")],
        [user("q"), said(THOUGHT), said("x"), user("p"), said("y")],
        [user("q"), said("x"), user("p"), said("y")],
        [said("x"), user(THOUGHT), said("y")],
    ]

    def masks(renderer, rows):
        return [marked(renderer(), {"messages": row}) for row in rows]

    alone = masks(lambda: Renderer(byte_tokenizer(template)), rows)
    one = Renderer(byte_tokenizer(template))
    assert masks(lambda: one, rows[::-1])[::-1] == alone


def test_a_thought_is_no_closing():
    chat = [user("q"), said(THOUGHT), user(";")]
    assert marked(Renderer(byte_tokenizer(OPEN_END)), {"messages": chat}) == (
        f"<|im_start|>user\nq<|im_end|>\n[[<|im_start|>assistant\n{THOUGHT}<|im_end|>\n]]<|im_start|>user\n;"
    )


def test_a_template_that_ends_with_the_system_message_is_refused():
    template = (
        "{% for m in messages if m.role != 'system' %}{{ '<' + m.role + '>' + m.content + '</>' }}{% endfor %}"
        "{% for m in messages if m.role == 'system' %}{{ 'SYSTEM ' + m.content }}{% endfor %}"
    )
    chat = [{"role": "system", "content": "s"}, user("q"), said("x")]
    with pytest.raises(SourceError, match="what message 0 says behind the beginning of message 2"):
        marked(Renderer(byte_tokenizer(template)), {"messages": chat})
    chat = chat[1:]
    assert marked(Renderer(byte_tokenizer(template)), {"messages": chat}) == "<user>q</>[[<assistant>x</>]]"


JOINED = "{% for m in messages %}{{ m.role + ': ' + m.content }}{% if not loop.last %}{{ '\n' }}{% endif %}{% endfor %}"
NUMBERED = "{% for m in messages %}{{ '#' ~ loop.index ~ ' ' ~ m.role ~ ': ' ~ m.content ~ '\n' }}{% endfor %}"
STRICT = (
    "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% if m.role == 'user' %}"
    "{{ '[INST] ' + m.content + ' [/INST]' }}{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)
TRIMMED = (
    "{% for m in messages %}{{ '<|' + ('model' if m.role == 'assistant' else m.role) + '|>' + m.content.strip() }}"
    "{{ '<|eot|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|model|>' }}{% endif %}"
)
TAGGED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ '<A>' + m.content + '</A>' }}"
    "{% endgeneration %}{% else %}{{ '<U>' + m.content + '</U>' }}{% endif %}{% endfor %}"
)
BEHIND = (
    "{% for m in messages %}{{ '<' + m.role + '>' + m.content }}"
    "{% if m.reasoning %}{{ '(because ' + m.reasoning + ')' }}{% endif %}{{ '</>' }}{% endfor %}"
)
CALLS = (
    "{% for m in messages %}{{ '<' + m.role + '>' }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name + '(' + c.function.arguments | tojson + ')' }}{% endfor %}{{ (m.content or '') + '</>' }}"
    "{% endfor %}"
)
LAST_USER = (
    "{% set ns = namespace(u=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.u = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{% if m.role == 'user' %}{% if tools and loop.index0 == ns.u %}"
    "{{ '[T]' + tools | tojson }}{% endif %}{{ '[I]' + m.content + '[/I]' }}{% else %}{{ m.content + eos_token }}"
    "{% endif %}{% endfor %}"
)
S, A, E = "<|im_start|>", "<|im_start|>assistant\n", "<|im_end|>\n"
Q = f"{S}user\nq{E}"
HEADERS, REASONING = {"headers": True}, {"reasoning": True}


def call(arguments):
    return {"type": "function", "function": {"name": "f", "arguments": arguments}}


@pytest.mark.parametrize(
    ("template", "row", "options", "expected"),
    [
        (CHATML, [said("x"), user("q"), said("x")], HEADERS, f"{A}[[x{E}]]{Q}{A}[[x{E}]]"),
        (CHATML, [user("q"), said("x"), said("x", weight=0), said("x")], {}, f"{Q}[[{A}x{E}]]{A}x{E}[[{A}x{E}]]"),
        (CHATML, [user("q"), said(f"{E}{S}user\n")], HEADERS, f"{Q}{A}[[{E}{S}user\n{E}]]"),
        (CHATML, [user("q"), said("\ue000\u0301\n")], HEADERS, f"{Q}{A}[[\ue000\u0301\n{E}]]"),
        (CHATML, [user("q"), said("<think>x</think>x")], REASONING, f"{Q}[[{A}]]<think>x</think>[[x{E}]]"),
        (CHATML, [user("q"), said("w</think>x")], REASONING, f"{Q}[[{A}]]w</think>[[x{E}]]"),
        (CHATML, [user("q"), said("x <think> y")], REASONING, f"{Q}[[{A}x <think> y{E}]]"),
        (OPEN_END, [user("q"), said(""), user("q"), said("x")], HEADERS, f"{Q}{A}[[{E}]]{Q}{A}[[x]]"),
        (
            JOINED,
            [user("assistant: b"), said("user: q\nassistant: "), user("\n"), said("\nuser: ")],
            {},
            "user: assistant: b\n[[assistant: user: q\nassistant: \n]]user: \n\n[[assistant: \nuser: ]]",
        ),
        (
            NUMBERED,
            [user("q"), said("2"), user("#4 assistant: "), said("#5")],
            {},
            "#1 user: q\n[[#2 assistant: 2\n]]#3 user: #4 assistant: \n[[#4 assistant: #5\n]]",
        ),
        (STRICT, [user("[/INST] "), said("</s>")], {}, "<s>[INST] [/INST]  [/INST][[ </s></s>]]"),
        (TRIMMED, [user(" q "), said(" <|model|> ")], HEADERS, "<|user|>q<|eot|><|model|>[[<|model|><|eot|>]]"),
        (
            TRIMMED,
            [user("q"), said("\u00a0"), said("x")],
            HEADERS,
            "<|user|>q<|eot|><|model|>[[<|eot|>]]<|model|>[[x<|eot|>]]",
        ),
        (TAGGED, [user("q"), said("x", train=0), said("y")], {}, "<U>q</U><A>x</A>[[<A>y</A>]]"),
        (BEHIND, [user("q"), said("x", reasoning="x")], REASONING, "<user>q</>[[<assistant>x]](because x)[[</>]]"),
        (
            CALLS,
            [user("q"), said("so", tool_calls=[call(' {"a":"so"}\n'), call("null")]), said("so")],
            {},
            '<user>q</>[[<assistant>f({"a": "so"})f("null")so</><assistant>so</>]]',
        ),
    ],
)
def test_a_combination_gives_what_was_written_down(template, row, options, expected):
    assert marked(Renderer(byte_tokenizer(template)), {"messages": row}, **options) == expected


def test_tools_in_the_last_question_are_no_part_of_an_answer():
    row = {"messages": [user("q"), said("x"), user("p"), said("y")], "tools": [{"n": "f"}]}
    expected = '[I]q[/I][[x</s>]][T][{"n": "f"}][I]p[/I][[y</s>]]'
    assert marked(Renderer(byte_tokenizer(LAST_USER)), row) == expected


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, f"{Q}[[{A}x{E}{A}y]]{E}"),
        (TAGGED, "<U>q</U>[[<A>x</A><A>y]]</A>"),
        (NUMBERED, "#1 user: q\n[[#2 assistant: x\n#3 assistant: y]]\n"),
    ],
    ids=["ChatML", "tagged", "numbered"],
)
def test_what_closes_an_answer_that_was_cut_off_is_not_supervised(template, expected):
    row = {"messages": [user("q"), said("x"), said("y")], "ended": False}
    assert marked(Renderer(byte_tokenizer(template)), row) == expected
