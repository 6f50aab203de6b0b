"""What is supervised, in `[[` and `]]`, for kinds of templates and conversations: values written by hand."""

import pytest

from dspark_store.format.jsonvalue import JsonValue
from dspark_store.sources.limits import RenderLimits
from dspark_store.sources.masks import render_with_spans, tokens_and_mask
from dspark_store.sources.messages import Conversation
from dspark_store.sources.options import ChatOptions
from dspark_store.sources.rendering import Renderer, Rendering
from dspark_store.sources.source import SourceError
from tests.sources.templates import CHATML, GPT_OSS, HERMES, LLAMA31, MISTRAL, QWEN3, QWEN25, byte_tokenizer, shown

LAST_ENDS = CHATML.replace(
    "+ '<|im_end|>\n' }}", "}}{% if loop.last %}{{ eos_token }}{% else %}{{ '<|im_end|>\n' }}{% endif %}"
)
TOOL: list[JsonValue] = [{"type": "function", "function": {"name": "f"}}]


def user(content):
    return {"role": "user", "content": content}


def said(content, why=None):
    return {"role": "assistant", "content": content, **({} if why is None else {"reasoning_content": why})}


def call(name="f", content="", why=None, **arguments):
    calls = [{"id": "call_0", "type": "function", "function": {"name": name, "arguments": arguments}}]
    return {**said(content, why), "tool_calls": calls}


def result(content):
    return {"role": "tool", "tool_call_id": "call_0", "content": content}


TWO = [user("a"), said("b"), user("c"), said("d")]

# Closings


UNPROMPTED = LAST_ENDS[: LAST_ENDS.index("{% if add_generation_prompt")]
ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('alternate') }}{% endif %}{% endfor %}{{ bos_token }}"
)


@pytest.mark.parametrize(
    ("template", "last"),
    [
        *((opening + LAST_ENDS, "</s>") for opening in ("", "{{ bos_token }}", "{{ '<|im_start|>system\nS' }}")),
        ("{{ bos_token }}" + UNPROMPTED, "</s>"),
        (ALTERNATING + LAST_ENDS, "</s>"),
        *((LAST_ENDS.replace("eos_token", repr(last)), last) for last in ("<|return|>", "<|end|>\n\n", "")),
    ],
)
def test_an_answer_has_the_closing_that_it_has_where_it_stands(template, last):
    start, stop = "<|im_start|>", "<|im_end|>\n"
    question, answer = start + "user\n", start + "assistant\n"
    assert shown(template, TWO).endswith(f"{question}a{stop}[[{answer}b{stop}]]{question}c{stop}[[{answer}d{last}]]")
    if template == LAST_ENDS:
        assert shown(template, TWO, headers=True) == (
            f"{question}a{stop}{answer}[[b{stop}]]{question}c{stop}{answer}[[d{last}]]"
        )


def test_headers_that_count_their_messages_are_headers():
    numbered = "{% for m in messages %}### {{ loop.index }} {{ m.role }}\n{{ m.content + '\n' }}{% endfor %}"
    assert shown(numbered, TWO) == "### 1 user\na\n[[### 2 assistant\nb\n]]### 3 user\nc\n[[### 4 assistant\nd\n]]"


def test_a_closing_may_end_like_what_opens_every_text():
    template = "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + '[/INST]' }}"
    template += "{% else %}{{ ' ' + m.content }}{{ eos_token if loop.last else '<|sep|>' }}{% endif %}{% endfor %}"
    assert shown(template, TWO) == "<s>[INST] a[/INST][[ b<|sep|>]][INST] c[/INST][[ d</s>]]"


def test_answers_in_a_row_have_their_closings():
    assert shown(LAST_ENDS, [user("a"), said("b"), said("b"), user("b"), said("b")]) == (
        "<|im_start|>user\na<|im_end|>\n[[<|im_start|>assistant\nb<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n]]"
        "<|im_start|>user\nb<|im_end|>\n[[<|im_start|>assistant\nb</s>]]"
    )


def test_a_template_that_ends_every_text_with_eos_closes_its_answers_with_nothing():
    assert shown("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{{ eos_token }}", TWO) == (
        "[user]a[[[assistant]b]][user]c[[[assistant]d</s>]]"
    )


# Reasoning


@pytest.mark.parametrize("content", ["<tool_call>x", "<b>x", "<think>x", "</think>x", "x", "\u00e9x"])
def test_the_first_token_behind_masked_reasoning_is_supervised(content):
    chat = [user("a"), said(content, "why"), result("r"), said("d")]
    assert "</think>\n\n[[" + content in shown(QWEN3, chat, reasoning=True)


def test_a_call_behind_masked_reasoning_is_supervised_from_its_first_token_on():
    expected = (
        "<|im_start|>user\na<|im_end|>\n{}<think>\nwhy\n</think>\n\n"
        '[[<tool_call>\n{{"name": "f", "arguments": {{"x": "<tool_call>"}}}}\n</tool_call><|im_end|>\n]]'
        "<|im_start|>user\n<tool_response>\nr\n</tool_response><|im_end|>\n"
    )
    chat = [user("a"), call(why="why", x="<tool_call>"), result("r")]
    for specials in ((), ("<|im_start|>", "<|im_end|>"), None):
        tokenizer = byte_tokenizer(QWEN3) if specials is None else byte_tokenizer(QWEN3, specials)
        text = shown(Renderer(tokenizer), chat, reasoning=True)
        assert text == expected.format("[[<|im_start|>assistant\n]]")
        text = shown(Renderer(tokenizer), chat, reasoning=True, headers=True)
        assert text == expected.format("<|im_start|>assistant\n")


def test_a_space_between_reasoning_and_content_belongs_to_the_token_that_has_it():
    bare = "{% for m in messages %}{{ m.role }}{{ ' ' + m.reasoning_content if m.reasoning_content }}"
    bare += "{{ ' ' + m.content }}\n{% endfor %}"
    tokenizer = byte_tokenizer(bare, [" why", " x", " a"])
    assert shown(Renderer(tokenizer), [user("a"), said("x", "why")], reasoning=True) == (
        "user a\n[[assistant]] why[[ x\n]]"
    )


def test_reasoning_in_a_channel_is_masked_as_a_whole():
    chat = [user("a"), call(why="plan", x=1), result("r"), said("d", "so")]
    assert shown(GPT_OSS, chat, reasoning=True) == (
        "<|start|>system<|message|>Be of help.<|end|><|start|>user<|message|>a<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>plan<|end|>"
        '[[<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"x": 1}<|call|>]]'
        '<|start|>functions.f to=assistant<|channel|>commentary<|message|>"r"<|end|>'
        "<|start|>assistant<|channel|>analysis<|message|>so<|end|>"
        "[[<|start|>assistant<|channel|>final<|message|>d<|return|>]]"
    )


@pytest.mark.parametrize("needs_the_key", [False, True])
def test_a_channel_that_is_written_wherever_there_is_the_key_is_masked_as_a_whole(needs_the_key):
    template = GPT_OSS.replace("{%- if loop.last and m.thinking %}", "{%- if loop.last and 'thinking' in m %}")
    template = template.replace("{%- if m.thinking %}", "{%- if 'thinking' in m %}")
    assert template.count("'thinking' in m") == 2
    analysis = "<|start|>assistant<|channel|>analysis<|message|>"
    masked = [f"{analysis}plan<|end|>[[", f"{analysis}so<|end|>[["]
    if needs_the_key:  # then its delimiters stay without reasoning, and are supervised
        refusal = "{%- if m.role == 'assistant' and 'thinking' not in m %}{{- raise_exception('why?') }}{%- endif %}"
        template = template.replace("{%- for m in messages %}", "{%- for m in messages %}" + refusal)
        masked = [f"[[{analysis}]]plan[[<|end|>", f"[[{analysis}]]so[[<|end|>"]
    chat = [user("a"), call(why="plan", x=1), result("r"), said("d", "so")]
    chat = [{"thinking" if key == "reasoning_content" else key: value for key, value in m.items()} for m in chat]
    assert shown(template, chat, reasoning=True) == (
        "<|start|>system<|message|>Be of help.<|end|><|start|>user<|message|>a<|end|>"
        + masked[0]
        + '<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"x": 1}<|call|>]]'
        '<|start|>functions.f to=assistant<|channel|>commentary<|message|>"r"<|end|>'
        + masked[1]
        + "<|start|>assistant<|channel|>final<|message|>d<|return|>]]"
    )


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("<think>\nwhy\n</think>\n\nb", "[[H]]<think>\nwhy\n</think>\n\n[[bE]]"),
        ("<think>why</think>b", "[[H]]<think>why</think>[[bE]]"),
        ("why\n</think>\n\nb", "[[H]]why\n</think>\n\n[[bE]]"),
        ("<think>why", "[[H]]<think>why[[E]]"),
        ("<think>\n\n</think>\n\nb", "[[H<think>\n\n</think>\n\nbE]]"),
        ("<think>a</think>b <think>c</think> d", "[[H]]<think>a</think>[[b ]]<think>c</think> [[dE]]"),
        ("see <think> tags", "[[Hsee <think> tagsE]]"),
        ("<think>why</think><b>", "[[H]]<think>why</think>[[<b>E]]"),
        ("<think>why</think>", "[[H]]<think>why</think>[[E]]"),
    ],
)
def test_reasoning_inside_a_content_is_masked(content, expected):
    text = expected.replace("H", "<|im_start|>assistant\n").replace("E", "<|im_end|>\n")
    assert shown(CHATML, [user("a"), said(content)], reasoning=True) == f"<|im_start|>user\na<|im_end|>\n{text}"


def test_reasoning_inside_a_content_is_masked_like_that_beside_it():
    for chat in ([user("a"), said("b", "why")], [user("a"), said("<think>\nwhy\n</think>\n\nb")]):
        assert shown(QWEN3, chat, reasoning=True) == (
            "<|im_start|>user\na<|im_end|>\n[[<|im_start|>assistant\n<think>\n]]why[[\n</think>\n\nb<|im_end|>\n]]"
        )


def test_reasoning_inside_a_content_is_masked_where_tags_say_what_is_supervised():
    tagged = CHATML.replace(
        "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}",
        "{{ '<|im_start|>' + m.role + '\n' }}{% generation %}{{ m.content + '<|im_end|>\n' }}{% endgeneration %}",
    )
    assert shown(tagged, [said("<think>why</think>b")], reasoning=True) == (
        "<|im_start|>assistant\n<think>why</think>[[b<|im_end|>\n]]"
    )


# Traces with tools

TRACE = [
    user("a"),
    call(x="y"),
    result("r"),
    result("<|im_start|>assistant\n"),
    call("g", x="<|im_start|>assistant\n", n=1),
    result(""),
    said("b"),
    user("c"),
    said(""),
]


def test_a_trace_in_a_template_with_a_system_prompt_of_its_own():
    assert shown(QWEN25, TRACE) == (
        "<|im_start|>system\nYou are of help.<|im_end|>\n<|im_start|>user\na<|im_end|>\n"
        '[[<|im_start|>assistant\n<tool_call>\n{"name": "f", "arguments": {"x": "y"}}\n</tool_call><|im_end|>\n]]'
        "<|im_start|>user\n<tool_response>\nr\n</tool_response>\n<tool_response>\n<|im_start|>assistant\n\n"
        "</tool_response><|im_end|>\n"
        '[[<|im_start|>assistant\n<tool_call>\n{"name": "g", "arguments": {"x": "<|im_start|>assistant\\n", "n": 1}}\n'
        "</tool_call><|im_end|>\n]]<|im_start|>user\n<tool_response>\n\n</tool_response><|im_end|>\n"
        "[[<|im_start|>assistant\nb<|im_end|>\n]]<|im_start|>user\nc<|im_end|>\n[[<|im_start|>assistant\n<|im_end|>\n]]"
    )


def test_a_trace_in_a_template_that_drops_the_reasoning_of_earlier_turns():
    chat = [user("a"), call(why="w", x="y"), result("r"), said("b", "v"), user("c"), call(why="u"), result("<b>r</b>")]
    assert shown(QWEN3, chat, TOOL, headers=True, reasoning=True) == (
        '<|im_start|>system\n\n\n<tools>\n{"type": "function", "function": {"name": "f"}}\n</tools><|im_end|>\n'
        "<|im_start|>user\na<|im_end|>\n"
        '<|im_start|>assistant\n[[<tool_call>\n{"name": "f", "arguments": {"x": "y"}}\n</tool_call><|im_end|>\n]]'
        "<|im_start|>user\n<tool_response>\nr\n</tool_response><|im_end|>\n<|im_start|>assistant\n[[b<|im_end|>\n]]"
        "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n<think>\nu\n</think>\n\n"
        '[[<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call><|im_end|>\n]]'
        "<|im_start|>user\n<tool_response>\n<b>r</b>\n</tool_response><|im_end|>\n"
    )


def test_results_that_a_user_passes_on_are_no_question():
    passed = user("<tool_response>\nr\n</tool_response>")
    assert shown(QWEN3, [user("a"), said("b", "v"), passed, said("c")], reasoning=True) == (
        "<|im_start|>user\na<|im_end|>\n[[<|im_start|>assistant\n]]<think>\nv\n</think>\n\n[[b<|im_end|>\n]]"
        "<|im_start|>user\n<tool_response>\nr\n</tool_response><|im_end|>\n"
        "[[<|im_start|>assistant\n<think>\n\n</think>\n\nc<|im_end|>\n]]"
    )


def test_a_trace_in_a_template_that_trims_contents_and_writes_results_as_json():
    head = "<s><|start_header_id|>system<|end_header_id|>\n\nKnowledge: December 2023\n<|eot_id|>"
    chat = [user(" a "), call(x="y"), result('"r"'), said("b\n"), user("c"), said("d")]
    assert shown(LLAMA31, chat) == (
        head + "<|start_header_id|>user<|end_header_id|>\n\na<|eot_id|>"
        '[[<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "f", "parameters": {"x": "y"}}<|eot_id|>]]'
        '<|start_header_id|>ipython<|end_header_id|>\n\n"\\"r\\""<|eot_id|>'
        "[[<|start_header_id|>assistant<|end_header_id|>\n\nb<|eot_id|>]]"
        "<|start_header_id|>user<|end_header_id|>\n\nc<|eot_id|>"
        "[[<|start_header_id|>assistant<|end_header_id|>\n\nd<|eot_id|>]]"
    )


def test_a_trace_in_a_template_whose_results_close_in_another_way_when_they_are_last():
    chat = [user("a"), call(x="y"), result("r"), call("g"), result("s"), said("b"), user("c")]
    assert shown(HERMES, chat, headers=True) == (
        "<s><|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
        '[[<tool_call>\n{"name": "f", "arguments": {"x": "y"}}\n</tool_call><|im_end|>\n]]'
        "<|im_start|>tool\n<tool_response>\nr\n</tool_response>\n<|im_end|><|im_start|>assistant\n"
        '[[<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call><|im_end|>\n]]'
        "<|im_start|>tool\n<tool_response>\ns\n</tool_response>\n<|im_end|><|im_start|>assistant\n"
        "[[b<|im_end|>\n]]<|im_start|>user\nc<|im_end|>\n"
    )


def test_a_system_message_that_moves_to_the_last_question():
    chat = [{"role": "system", "content": "S"}, *TWO]
    assert shown(MISTRAL, chat) == "<s>[INST] a[/INST][[ b</s>]][INST] S\n\nc[/INST][[ d</s>]]"
    assert shown(MISTRAL, chat, headers=True) == "<s>[INST] a[/INST] [[b</s>]][INST] S\n\nc[/INST] [[d</s>]]"


def test_a_header_that_a_prompt_does_not_name_is_found():
    thinking = CHATML.replace("{{ '<|im_start|>assistant\n' }}", "{{ '<|im_start|>assistant\n<think>\n' }}")
    assert shown(thinking, TWO) == (
        "<|im_start|>user\na<|im_end|>\n[[<|im_start|>assistant\nb<|im_end|>\n]]"
        "<|im_start|>user\nc<|im_end|>\n[[<|im_start|>assistant\nd<|im_end|>\n]]"
    )


# What a row says of itself


def test_variables_of_a_row_reach_the_template_and_its_prompt():
    text = shown(QWEN3, [user("a"), said("b")], headers=True, template_kwargs={"enable_thinking": False})
    assert text == ("<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n[[b<|im_end|>\n]]")


def test_turns_that_are_written_as_without_the_variables_of_the_job_have_headers_too():
    renderer = Renderer(byte_tokenizer(QWEN3), {"enable_thinking": False})
    assert shown(renderer, [user("a"), call(), user("b"), said("c")], headers=True) == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
        '[[<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call><|im_end|>\n]]'
        "<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n[[c<|im_end|>\n]]"
    )


def test_variables_of_a_row_win_over_those_of_the_job():
    renderer = Renderer(byte_tokenizer(CHATML + "{{ x }}{{ y }}"), {"x": 1, "y": 2})
    assert shown(renderer, [user("a")], template_kwargs={"y": 3}) == "<|im_start|>user\na<|im_end|>\n13"


TAGGED = CHATML.replace(
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}",
    "{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>\n' }}"
    "{% endgeneration %}{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}",
)


@pytest.mark.parametrize("template", [CHATML, TAGGED])
def test_a_message_may_say_that_it_is_not_supervised(template):
    text = shown(template, TWO, headers=True, supervised=[False, False, False, True])
    assert text == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
        "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n[[d<|im_end|>\n]]"
    )


def test_what_is_not_supervised_moves_with_system_messages_between_turns():
    template = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    template += "{% endfor %}" + CHATML
    chat = [*TWO[:2], {"role": "system", "content": "S"}, *TWO[2:]]
    text = shown(template, chat, supervised=[False, True, False, False, False])
    assert text == (
        "<|im_start|>user\na<|im_end|>\n[[<|im_start|>assistant\nb<|im_end|>\n]]"
        "<|im_start|>user\nS\n\nc<|im_end|>\n<|im_start|>assistant\nd<|im_end|>\n"
    )


def test_what_is_not_supervised_moves_with_a_folded_system_message():
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML
    chat = [{"role": "system", "content": "S"}, *TWO]
    text = shown(template, chat, supervised=[False, False, True, False, False])
    assert text == (
        "<|im_start|>user\nS\n\na<|im_end|>\n[[<|im_start|>assistant\nb<|im_end|>\n]]"
        "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\nd<|im_end|>\n"
    )


@pytest.mark.parametrize("template", [CHATML, TAGGED])
@pytest.mark.parametrize("content", ["b", "b \n", " b"])
def test_what_closes_an_answer_that_was_cut_off_is_not_supervised(template, content):
    text = shown(template, [user("a"), said(content)], headers=True, ended=False)
    assert text == f"<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n[[{content}]]<|im_end|>\n"


def test_reasoning_that_was_cut_off_is_all_that_was_said():
    assert shown(QWEN3, [user("a"), said("", "why")], headers=True, ended=False) == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n[[<think>\nwhy]]\n</think>\n\n<|im_end|>\n"
    )


def test_a_call_that_was_cut_off_keeps_what_was_said_of_it():
    text = shown(QWEN25, [user("a"), call(x="<|im_end|>\n")], headers=True, ended=False)
    assert text.endswith(
        '<|im_start|>assistant\n[[<tool_call>\n{"name": "f", "arguments": {"x": "<|im_end|>\\n"}}\n</tool_call>]]'
        "<|im_end|>\n"
    )


def test_an_answer_that_was_cut_off_before_it_began_has_nothing_supervised_but_its_header():
    chat = [user("a"), said("")]
    assert shown(CHATML, chat, headers=True, ended=False).count("[[") == 0
    assert shown(CHATML, chat, ended=False).endswith("[[<|im_start|>assistant\n]]<|im_end|>\n")


def test_only_the_last_answer_is_cut_off_and_only_if_it_is_the_last_message():
    assert shown(CHATML, TWO[:3], ended=False) == shown(CHATML, TWO[:3])
    assert shown(CHATML, TWO, ended=False).endswith("[[<|im_start|>assistant\nd]]<|im_end|>\n")


# What the generation prompt writes


def test_a_header_that_the_prompt_writes_is_not_supervised_with_tags_or_without():
    tagged = CHATML.replace("{{ '<|im_start|>' + m.role", "{% generation %}{{ '<|im_start|>' + m.role", 1).replace(
        "+ '<|im_end|>\n' }}", "+ '<|im_end|>\n' }}{% endgeneration %}", 1
    )
    expected = "<|im_start|>assistant\n[[b<|im_end|>\n]]<|im_start|>user\nc"
    assert expected in shown(CHATML, TWO, prompts=True)
    assert "[[b<|im_end|>\n<|im_start|>user" in shown(tagged, TWO, prompts=True)
    assert shown(CHATML, TWO[1:], prompts=True).startswith("<|im_start|>assistant\n[[b")


def test_a_block_of_reasoning_that_the_prompt_leaves_empty_is_not_supervised_and_one_that_was_said_is():
    empty = shown(QWEN3, [user("a"), said("b")], prompts=True)
    assert empty.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n[[b<|im_end|>\n]]")
    thought = shown(QWEN3, [user("a"), said("b", "why")], prompts=True)
    assert thought.endswith("<|im_start|>assistant\n[[<think>\nwhy\n</think>\n\nb<|im_end|>\n]]")


def test_a_prompt_that_stands_only_in_part_or_changes_what_is_before_masks_nothing():
    partly = CHATML.replace("assistant\n' }}{% endif", "assistant\n<think>' }}{% endif")
    assert "[[<|im_start|>assistant\nb" in shown(partly, TWO, prompts=True)
    rewriting = "{% if add_generation_prompt %}S{% endif %}" + CHATML
    assert "[[<|im_start|>assistant\nb" in shown(rewriting, TWO, prompts=True)


# Cost


def rendered_sizes(template, chat, *, reasoning):
    """Return the size of each render of a conversation by a new renderer, and of the text."""
    renderer = Renderer(byte_tokenizer(template))
    sizes = []
    render = renderer.render

    def counted(*arguments, **flags):
        text = render(*arguments, **flags)
        sizes.append(len(text))
        return text

    renderer.render = counted  # type: ignore[method-assign]
    rendered = render_with_spans(renderer, Conversation(chat, TOOL), ChatOptions(mask_reasoning_content=reasoning))
    assert rendered.supervised
    return sizes, len(rendered.text)


def trace(turns):
    chat = [{"role": "system", "content": "S"}, user("find it"), said("I will.", "plan"), user("now")]
    for turn in range(turns):
        why = f"because {turn}" if turn % 3 else None
        chat.append(call("fgh"[turn % 3], "" if turn % 2 else f"look {turn}", why, x=f"v{turn}", n=turn))
        chat.append(result("" if turn % 5 == 0 else f"<r>{turn}</r>"))
    return [*chat, said("done", "enough"), user("thanks"), said("bye")]


@pytest.mark.parametrize("reasoning", [False, True])
@pytest.mark.parametrize(
    "template", [QWEN25, QWEN3, LLAMA31, HERMES], ids=["Qwen 2.5", "Qwen 3", "Llama 3.1", "Hermes"]
)
def test_a_trace_is_rendered_as_often_as_a_short_one(template, reasoning):
    sizes = {turns: rendered_sizes(template, trace(turns), reasoning=reasoning) for turns in (25, 50, 100)}
    for made, text in sizes.values():
        assert sum(size > text // 2 for size in made) <= 3
        assert sum(made) < 4 * text + 20_000
    assert len(sizes[100][0]) == len(sizes[50][0]) <= len(sizes[25][0]) + 2


MEASURING = "{% for m in messages %}<s>{{ m.role }} {{ m.content|length }} {{ m.content }}</s>{% endfor %}"


def test_a_template_that_marks_change_is_explained_by_first_messages():
    assert shown(MEASURING, TWO) == "<s>user 1 a</s>[[<s>assistant 1 b</s>]]<s>user 1 c</s>[[<s>assistant 1 d</s>]]"


def test_a_row_that_needs_too_many_renders_is_refused():
    renderer = Renderer(byte_tokenizer(MEASURING))
    with pytest.raises(SourceError, match=r"more than 2,000 renders of the chat template; .*\{% generation %\}"):
        tokens_and_mask(renderer, Conversation(TWO * 1001, None))


def test_renders_of_one_row_are_counted():
    renderer = Renderer(byte_tokenizer(CHATML), limits=RenderLimits(renders=2))
    rendering = Rendering(renderer, TWO, None, None, "")
    rendering.render(TWO)
    rendering.render(TWO)
    with pytest.raises(SourceError, match="more than 2 renders"):
        rendering.render(TWO)


@pytest.mark.parametrize("template", [QWEN25, QWEN3, LLAMA31])
def test_a_plain_chat_with_tools_of_its_own_is_rendered_once(template, monkeypatch):
    renderer = Renderer(byte_tokenizer(template))

    def tools(name: str) -> list[JsonValue]:
        return [{"type": "function", "function": {"name": name, "description": "find " * 99}}]

    tokens_and_mask(renderer, Conversation(TWO, tools("f")))
    renders: list[object] = []
    render = Renderer.render

    def counted(*args, **options):
        renders.append(args)
        return render(*args, **options)

    monkeypatch.setattr(Renderer, "render", counted)
    chat = [user("find"), said("find"), user("find me"), said("find it")]
    _, mask = tokens_and_mask(renderer, Conversation(chat, tools("find")))
    assert len(renders) == 1
    alone = Renderer(byte_tokenizer(template))
    monkeypatch.setattr("dspark_store.sources.turns.explain", lambda *args: None)
    assert mask.tolist() == tokens_and_mask(alone, Conversation(chat, tools("find")))[1].tolist()
