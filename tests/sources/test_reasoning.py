from typing import ClassVar, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Encoding

from dspark_store.sources.masks import render_with_spans, tokens_and_mask, tokens_in_spans
from dspark_store.sources.messages import Conversation, Message
from dspark_store.sources.options import ChatOptions
from dspark_store.sources.reasoning import Stretch, removed_stretch
from dspark_store.sources.rendering import Renderer
from tests.sources.shapes import SHAPES
from tests.sources.test_masks import REWRITTEN, WithoutOffsets, bits
from tests.sources.words import HEADER, HEADER_CHAT, THINKING, THINKING_IN_LAST_TURN_ONLY, word_tokenizer

HI: Message = {"role": "user", "content": "hi"}


def answer(content, reasoning, field="reasoning_content"):
    return {"role": "assistant", "content": content, field: reasoning}


def masked(template, messages, tokenizer=None, warnings=None):
    """Return the positions that hold reasoning."""
    renderer = Renderer(tokenizer or word_tokenizer(template))
    rendered = render_with_spans(renderer, Conversation(messages, None), ChatOptions(mask_reasoning_content=True))
    (tokens,) = renderer.tokenise([rendered.text])
    assert rendered.warnings == ([] if warnings is None else warnings)
    spans = [item.span() if isinstance(item, Stretch) else item for item in rendered.masked]
    return np.flatnonzero(tokens_in_spans(renderer, rendered.text, tokens, spans)).tolist()


def test_the_delimiters_that_vanish_belong_to_the_reasoning():
    renderer = Renderer(word_tokenizer(THINKING))
    conversation = Conversation([HI, answer("ok", "r1 r2")], None)
    _, mask = tokens_and_mask(renderer, conversation, ChatOptions(mask_reasoning_content=True))
    assert mask.tolist() == bits("0*4 1 1 0*4 1 1")


def test_every_message_has_its_own():
    assert masked(THINKING, [HI, answer("ok", "r1"), HI, answer("yo", "r2 r3")]) == [6, 7, 8, 17, 18, 19, 20]


def test_delimiters_that_stay_are_not_masked():
    always = THINKING.replace("{% if m.reasoning_content %}", "{% if m.role == 'assistant' %}")
    assert masked(always, [HI, answer("ok", "r1 r2")]) == [7, 8]


BARE = (
    "{% for m in messages %}<s> {{ m.role }} {% if m.reasoning_content %}{{ m.reasoning_content }} {% endif %}"
    "{{ m.content }} </s> {% endfor %}"
)


@pytest.mark.parametrize(
    ("content", "reasoning", "expected"),
    [
        ("w1 w2", "w1", [6]),
        ("w1 w1 w1", "w1 w1", [6, 7]),
        ("w2", "w1 w2 w1", [6, 7, 8]),
        ("ok", "assistant", [6]),
    ],
)
def test_reasoning_that_looks_like_its_neighbours_is_found_exactly(content, reasoning, expected):
    assert masked(BARE, [HI, answer(content, reasoning)]) == expected


def test_reasoning_that_the_template_drops_is_a_warning():
    warnings = ["the chat template does not render the reasoning of message 1"]
    assert masked(THINKING_IN_LAST_TURN_ONLY, REWRITTEN, warnings=warnings) == [14, 15, 16]


def test_reasoning_of_the_last_turn_stands_where_upstreams_worked_example_has_it():
    last_only = (
        "{% for m in messages %}{{ m.role }} {% if m.reasoning_content and loop.last %}{{ m.reasoning_content }} "
        "{% endif %}{{ m.content }} {% if m.role == 'assistant' %}</s> {% endif %}{% endfor %}"
    )
    warnings = ["the chat template does not render the reasoning of message 1"]
    assert masked(last_only, [HI, answer("ok", "r3"), HI, answer("yo", "r1 r2")], warnings=warnings) == [8, 9]
    (whole,) = Renderer(word_tokenizer()).tokenise(["user hi assistant ok </s> user hi assistant r1 r2 yo </s>"])
    assert len(whole.ids) == 12


def test_blank_reasoning_and_that_of_users_is_left_alone():
    assert masked(BARE, [{**HI, "reasoning_content": "r1"}, answer("ok", ""), HI]) == []


def test_a_header_that_changes_with_the_reasoning_belongs_to_it():
    assert masked(HEADER, HEADER_CHAT) == [4, 5, 6, 12, 13]


def test_other_names_of_the_field_are_known():
    assert masked(THINKING, [HI, answer("ok", "r1", field="thinking")]) == [6, 7, 8]


def test_reasoning_rendered_in_another_form_is_found_by_what_changes():
    upper = BARE.replace(
        "{{ m.reasoning_content }}", "{{ m.reasoning_content|length }} {{ m.reasoning_content|upper }}"
    )
    assert masked(upper, [HI, answer("ok", "r1 r2")]) == [6, 7, 8]


def test_tokenizers_without_offsets_give_the_same():
    slow = WithoutOffsets(tokenizer_object=word_tokenizer().backend_tokenizer, eos_token="</s>")
    slow.chat_template = BARE
    assert masked(BARE, [HI, answer("w1 w2", "w1")], slow) == [6]


def test_a_removed_stretch_knows_what_it_must_contain():
    assert removed_stretch("a b b c", "a b c", None) == Stretch(1, 4, 2)
    assert removed_stretch("a b b c", "a b c", (2, 3)) == Stretch(1, 2, 2)
    assert removed_stretch("same", "same", None) is None
    assert removed_stretch("ab", "axb", None) is None


class Trimmed:
    """Says what a tokenizer says that trims spaces off: its token of spaces is empty."""

    offsets: ClassVar = [(0, 2), (4, 4), (4, 9)]

    def char_to_token(self, place):
        return next((token for token, (start, stop) in enumerate(self.offsets) if start <= place < stop), None)

    def token_to_chars(self, token):
        return self.offsets[token]


@given(st.text("ab ", max_size=6), st.text("ab ", max_size=3), st.text("ab ", min_size=1, max_size=4), st.text("ab "))
def test_taking_the_span_out_gives_the_other_text(head, before, core, tail):
    text, without = head + before + core + tail, head + tail
    stretch = removed_stretch(text, without, (len(head + before), len(head + before + core)))
    assert stretch is not None
    for start in range(stretch.first, stretch.last + 1):
        stop = start + stretch.size
        assert text[:start] + text[stop:] == without
        assert start <= len(head + before)
        assert stop >= len(head + before + core)


def test_offsets_without_their_spaces_are_enough():
    renderer = Renderer(word_tokenizer())
    (tokens,) = renderer.tokenise(["hi  there"])
    trimmed = type(tokens)(np.array([1, 2, 3], np.int32), cast(Encoding, Trimmed()))
    assert tokens_in_spans(renderer, "hi  there", trimmed, [(2, 4)]).tolist() == [False, True, False]
    assert tokens_in_spans(renderer, "hi  there", trimmed, [(0, 2)]).tolist() == [True, False, False]
    assert tokens_in_spans(renderer, "hi  there", trimmed, [(1, 5)]).tolist() == [True, True, True]


def test_all_tokens_of_one_character_go_together():
    renderer = Renderer(SHAPES[0].tokenizer(tagged=True))
    (tokens,) = renderer.tokenise(["a🤗b"])
    assert tokens_in_spans(renderer, "a🤗b", tokens, [(1, 2)]).tolist() == bits("0 1*4 0")
