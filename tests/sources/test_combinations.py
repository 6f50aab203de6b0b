"""Templates and rows that were thought of by somebody who had not read the code, with the masks written down before."""

import pytest

from dspark_store.sources.masks import MaskOptions, loss_mask, render_with_spans
from dspark_store.sources.messages import read_conversation
from dspark_store.sources.rendering import Renderer
from tests.sources.templates import byte_tokenizer

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
    rendered = render_with_spans(renderer, read_conversation(row), MaskOptions(**options))
    (tokens,) = renderer.tokenise([rendered.text])
    text, inside = "", False
    for (start, stop), bit in zip(tokens.encoding.offsets, loss_mask(renderer, rendered, tokens), strict=True):
        text += ("" if bit == inside else "[[" if bit else "]]") + rendered.text[start:stop]
        inside = bit
    return text + ("]]" if inside else "")


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
