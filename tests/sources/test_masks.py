import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from dspark_store.sources.masks import tokens_and_mask
from dspark_store.sources.messages import Conversation, Message
from dspark_store.sources.options import ChatOptions
from dspark_store.sources.rendering import Renderer
from dspark_store.sources.source import SourceError
from dspark_store.sources.turns import shared_prefix_length
from tests.sources.words import CHAT, PLAIN, TAGGED, THINKING_IN_LAST_TURN_ONLY, WORDS, word_tokenizer


def mask_of(template, messages=CHAT, tokenizer=None, *, headers=False):
    renderer = Renderer(tokenizer or word_tokenizer(template))
    _, mask = tokens_and_mask(renderer, Conversation(messages, None), ChatOptions(mask_headers=headers))
    return mask.tolist()


def bits(text):
    """`0*2 1` for [0, 0, 1]."""
    runs = [run.partition("*") for run in text.split()]
    return [int(value) for value, _, count in runs for _ in range(int(count or 1))]


REWRITTEN: list[Message] = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yo", "reasoning_content": "r1"},
    {"role": "user", "content": "bye"},
    {"role": "assistant", "content": "ok", "reasoning_content": "r2"},
]


PROMPTED = PLAIN + "{% if add_generation_prompt %}<s> assistant {% endif %}"
BARE = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
SHORT: list[Message] = [{"role": role, "content": "hi"} for role in ("user", "assistant", "user", "assistant")]


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        (PLAIN, CHAT, "0*5 1*5 0*4 1*4"),  # an answer has its header and its closing too
        (TAGGED, CHAT, "0*7 1*3 0*6 1*2"),  # what is inside of the tags
        (BARE, SHORT, "0*2 1*2 0*2 1*2"),
        (PLAIN, CHAT[:1], "0*5"),
        (TAGGED, CHAT[:1], "0*5"),
        (PLAIN, CHAT[1:3], "1*5 0*4"),
        (TAGGED, CHAT[1:3], "0*2 1*3 0*4"),
        (PLAIN, [CHAT[0], CHAT[1], CHAT[3]], "0*5 1*9"),
        (BARE + "</s>", CHAT, "0*3 1*3 0*2 1*3"),  # which longer renders do not have there
        (THINKING_IN_LAST_TURN_ONLY, REWRITTEN, "0*4 1*4 0*4 1*7"),
        ("<pad> " + PROMPTED, CHAT[1:3], "0 1*5 0*4"),  # what opens every text is no part of an answer
    ],
)
def test_what_the_assistant_said_is_supervised(template, messages, expected):
    assert mask_of(template, messages) == bits(expected)


@pytest.mark.parametrize(
    ("prefix", "terminator", "length"),
    [
        ("", None, 0),
        ("1", None, 1),
        ("12", None, 2),
        ("123", None, 3),
        ("9", None, None),
        ("19", None, None),
        ("193", None, None),
        ("1234", None, None),
        ("19", "9", 1),
        ("9", "9", None),
        ("1239", "9", None),
    ],
)
def test_a_prefix_is_exact_up_to_a_terminator(prefix, terminator, length):
    assert shared_prefix_length(prefix, "123", terminator) == length


def test_a_turn_that_cannot_be_located_is_an_error():
    counting = "{% for m in messages %}<s> {{ m.role }} w{{ messages|length }} {{ m.content|length }} </s> {% endfor %}"
    with pytest.raises(SourceError, match=r"rewrites earlier turns.*first 1 messages.*\{% generation %\}"):
        mask_of(counting, REWRITTEN)


def test_headers_can_be_left_out_without_tags_too():
    assert mask_of(PROMPTED, headers=True) == mask_of(TAGGED)
    assert mask_of(PLAIN, headers=True) == mask_of(TAGGED)


def test_generation_tags_work_where_earlier_turns_change():
    tagged = (
        "{% for m in messages %}<s> {{ m.role }} {% if m.role == 'assistant' %}{% generation %}"
        "{% if m.reasoning_content and loop.last %}<think> {{ m.reasoning_content }} </think> {% endif %}"
        "{{ m.content }} </s> {% endgeneration %}{% else %}{{ m.content }} </s> {% endif %}{% endfor %}"
    )
    assert mask_of(tagged, REWRITTEN) == bits("0*6 1*2 0*6 1*5")


def test_a_refused_conversation_says_why():
    with pytest.raises(SourceError, match="the chat template refuses the conversation: no, thanks"):
        mask_of("{{ raise_exception('no, thanks') }}")


@pytest.mark.parametrize("template", [PLAIN, TAGGED])
def test_padding_options_of_the_tokenizer_do_not_matter(template):
    tokenizer = word_tokenizer(template, padding_side="left")
    tokenizer.backend_tokenizer.enable_padding(length=40, direction="left")
    tokenizer.backend_tokenizer.enable_truncation(3)
    assert tokenizer.pad_token_id == 0
    assert mask_of(template, tokenizer=tokenizer) == mask_of(template)


@pytest.mark.parametrize("template", [PLAIN, TAGGED])
def test_half_a_surrogate_pair_is_an_error(template):
    with pytest.raises(SourceError, match=r"the chat template refuses|surrogate"):
        mask_of(template, [{"role": "user", "content": "\ud800"}])


@pytest.mark.parametrize("special", [{}, {"additional_special_tokens": ["user", "assistant"]}])
def test_tools_are_rendered_in_every_prefix(special):
    template = "{% if tools %}{{ tools[0].name }} {% endif %}" + PLAIN
    renderer = Renderer(word_tokenizer(template, **special))
    _, mask = tokens_and_mask(renderer, Conversation(CHAT[:2], [{"name": "w1"}]))
    assert mask.tolist() == bits("0*6 1*5")


class WithoutOffsets(PreTrainedTokenizerFast):
    """Stands for a tokenizer without fast backend."""

    is_fast = False

    def __call__(self, *args, return_offsets_mapping=False, **options):
        assert not return_offsets_mapping
        return super().__call__(*args, **options)


@pytest.mark.parametrize("template", [PLAIN, TAGGED])
def test_without_offsets_the_masks_are_the_same(template):
    fast = word_tokenizer(template)
    slow = WithoutOffsets(tokenizer_object=fast.backend_tokenizer, eos_token="</s>")
    slow.chat_template = template
    assert mask_of(template, tokenizer=slow) == mask_of(template)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(vocab_size=400, initial_alphabet=ByteLevel.alphabet(), special_tokens=["<s>", "</s>"])
    generator = random.Random(7)
    backend.train_from_iterator([" ".join(generator.choices(WORDS, k=40)) for _ in range(50)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", bos_token="<s>")


CHATML = "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}</s>\n{% endfor %}"
UNMARKED = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}"


@pytest.mark.parametrize("template", [CHATML, UNMARKED])
def test_a_mask_is_what_the_renders_of_first_messages_say(template):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    renderer = Renderer(tokenizer)
    text = st.text(st.sampled_from(" \n<s>/aé🤗\u0301hiyo"), max_size=12)

    @settings(deadline=None, max_examples=60)
    @given(st.lists(st.tuples(st.sampled_from(["user", "assistant"]), text), min_size=1, max_size=5))
    def check(turns):
        messages: list[Message] = [{"role": role, "content": content} for role, content in turns]
        ends = [len(renderer.render(messages[:count], None)) for count in range(len(messages) + 1)]
        (tokens,) = renderer.tokenise([renderer.render(messages, None)])
        offsets = tokens.encoding.offsets if tokens.encoding is not None else []
        expected = [
            any(
                start < ends[index + 1] and stop > ends[index]
                for index, message in enumerate(messages)
                if message["role"] == "assistant"
            )
            for start, stop in offsets
        ]
        assert tokens_and_mask(renderer, Conversation(messages, None))[1].tolist() == expected

    check()


def test_masks_and_ids_have_the_types_of_a_sample():
    ids, mask = tokens_and_mask(Renderer(word_tokenizer()), Conversation(CHAT, None))
    assert (ids.dtype.name, mask.dtype.name) == ("int32", "uint8")
    assert [WORDS[index] for index in ids[:5]] == ["<s>", "user", "hi", "there", "</s>"]


def test_no_special_token_is_added_to_what_the_template_rendered():
    tokenizer = word_tokenizer()
    begin = ("<s>", WORDS.index("<s>"))
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[begin])
    (tokens,) = Renderer(tokenizer).tokenise(["hi there"])
    assert tokens.ids.tolist() == [WORDS.index("hi"), WORDS.index("there")]
