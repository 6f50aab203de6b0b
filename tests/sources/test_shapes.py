"""Masks over the shapes of the templates in use, against pieces that were written down without Jinja."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_store.format.jsonvalue import JsonValue
from dspark_store.sources.masks import tokens_and_mask
from dspark_store.sources.messages import read_conversation
from dspark_store.sources.options import ChatOptions
from dspark_store.sources.rendering import Renderer
from tests.sources.shapes import ENDING, HEADER, REASONING, SAID, SHAPES

TEXT = st.text(st.sampled_from(" \nabé🤗assistant:"), max_size=12)
SAYING = TEXT.filter(str.strip)


@st.composite
def chats(draw, shape):
    """Draw a conversation that the shape can take."""
    first = 0 if shape.alternates else draw(st.integers(0, 1))
    chat = []
    for index in range(first, first + draw(st.integers(1, 5))):
        if index % 2:
            chat.append({"role": "assistant", "content": draw(TEXT)})
            if draw(st.booleans()):
                chat[-1]["reasoning_content"] = draw(SAYING)
        else:
            chat.append({"role": "user", "content": draw(SAYING)})
    if draw(st.booleans()) and any(message["role"] == "user" for message in chat):
        chat.insert(0, {"role": "system", "content": draw(SAYING)})
    return chat


def folded(shape, chat):
    if not shape.folds_system or chat[0]["role"] != "system":
        return chat
    return [{**chat[1], "content": f"{chat[0]['content']}\n\n{chat[1]['content']}"}, *chat[2:]]


def expected_text(shape, chat, kinds):
    said = [text for kind, text in shape.pieces(folded(shape, chat)) if kind in kinds]
    return "".join(said)


def supervised_text(renderer, chat, *, headers=False, reasoning=False):
    conversation = read_conversation({"messages": chat})
    options = ChatOptions(mask_headers=headers, mask_reasoning_content=reasoning)
    ids, mask = tokens_and_mask(renderer, conversation, options)
    whole = renderer.tokenizer.decode(ids)
    return whole, renderer.tokenizer.decode(ids[mask == 1])


@pytest.mark.parametrize("tagged", [True, False], ids=["tagged", "untagged"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_what_is_supervised_is_what_the_assistant_said_and_what_closes_it(shape, tagged):
    renderer = Renderer(shape.tokenizer(tagged=tagged))
    every_kind = (HEADER, SAID, REASONING, ENDING, "other")

    @settings(deadline=None, max_examples=25)
    @given(chats(shape))
    def check(chat):
        ending = {ENDING} if not tagged and chat[-1]["role"] == "assistant" else set()
        whole, said = supervised_text(renderer, chat, headers=True)
        assert whole == expected_text(shape, chat, every_kind)
        # A template without a prompt does not say where its header ends: what stands before a content is none of it.
        silent = shape.name == "Mistral" and not tagged
        expected = expected_text(shape, chat, {SAID, REASONING} | ending)
        assert said.replace(" ", "") == expected.replace(" ", "") if silent else said == expected

        _, said = supervised_text(renderer, chat, headers=True, reasoning=True)
        expected = expected_text(shape, chat, {SAID} | ending)
        assert said.replace(" ", "") == expected.replace(" ", "") if silent else said == expected

        _, said = supervised_text(renderer, chat)
        headers = set() if tagged else {HEADER}
        assert said == expected_text(shape, chat, {SAID, REASONING} | headers | ending)

    check()


def test_thinking_inside_the_content_of_earlier_turns_is_left_out_as_the_template_does():
    shape = next(shape for shape in SHAPES if shape.name == "Qwen 3")
    chat = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>\nwhy\n</think>\n\nb"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "<think>\nso\n</think>\n\nd"},
    ]
    renderer = Renderer(shape.tokenizer(tagged=False))
    assert supervised_text(renderer, chat, headers=True)[1] == ("b<|im_end|>\n<think>\nso\n</think>\n\nd<|im_end|>\n")


@pytest.mark.parametrize("tagged", [True, False], ids=["tagged", "untagged"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_the_ids_are_those_of_the_tokenizers_own_call(shape, tagged):
    tokenizer = shape.tokenizer(tagged=tagged)
    chat: list[JsonValue] = [
        {"role": "user", "content": "hi", "name": None, "tool_calls": None},
        {"role": "assistant", "content": " yo\n", "reasoning_content": "why", "name": None},
        {"role": "user", "content": "\u00e9"},
        {"role": "assistant", "content": ""},
    ]
    conversation = read_conversation({"messages": chat})
    ids, _ = tokens_and_mask(Renderer(tokenizer), conversation)
    assert ids.tolist() == tokenizer.apply_chat_template(conversation.messages)["input_ids"]
