import json
import logging

import pytest

from dspark_store.sources.messages import Message
from dspark_store.sources.rendering import Renderer
from dspark_store.sources.source import SourceError
from dspark_store.sources.template import (
    CLOCK,
    Clock,
    LimitedTemplate,
    apply_chat_template_option,
    has_generation_tags,
    may_ask_clock,
)
from tests.sources.words import PLAIN, TAGGED, word_tokenizer

NEVER = "{{ raise_exception('never') }}"


def template_from(value, own=None):
    tokenizer = word_tokenizer(own)
    apply_chat_template_option(tokenizer, value)
    return tokenizer.chat_template


def test_a_template_is_the_tokenizers_own_or_given_inline_or_in_a_file(tmp_path):
    (tmp_path / "t.jinja").write_text(TAGGED)
    assert template_from(None, own=PLAIN) == PLAIN
    for inline in ("{% for m in messages %}{% endfor %}", "{{ messages }}"):
        assert template_from(inline, own=PLAIN) == inline
    assert template_from(tmp_path / "t.jinja") == template_from(str(tmp_path / "t.jinja")) == TAGGED
    with pytest.raises(SourceError, match="no chat template"):
        template_from(None)


def test_a_json_file_gives_its_entry(tmp_path):
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({"chat_template": PLAIN}))
    assert template_from(path) == PLAIN
    path.write_text(json.dumps({"chat_template": [{"name": "default", "template": PLAIN}]}))
    assert template_from(path) == {"default": PLAIN}


def test_a_json_file_without_the_entry_gives_its_text_with_a_warning(tmp_path, caplog):
    (tmp_path / "t.json").write_text('{"other": 1}')
    with caplog.at_level(logging.WARNING):
        assert template_from(tmp_path / "t.json") == '{"other": 1}'
    assert "holds no Jinja" in caplog.text


@pytest.mark.parametrize("value", ["templates/chat.jinja", "chatml", "", "a" * 10_000])
def test_a_mistyped_path_is_an_error(value, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SourceError, match="neither a file that can be read nor Jinja"):
        template_from(value, own=PLAIN)


@pytest.mark.parametrize(
    "tag", ["{% generation %}", "{%generation%}", "{%- generation -%}", "{%+ generation %}", "{%-generation%}"]
)
def test_every_spelling_of_the_generation_tag_is_found(tag):
    assert has_generation_tags(f"{{% for m in messages %}}{tag}a{{%- endgeneration %}}{{% endfor %}}")


@pytest.mark.parametrize(
    "template",
    [
        PLAIN,
        "{# {% generation %} #}{{ messages }}",
        "{% raw %}{% generation %}{% endraw %}",
        "{{ '{% generation %}' }}{% for m in messages %}{% continue %}{% endfor %}",
    ],
)
def test_a_tag_that_is_not_executed_does_not_count(template):
    assert not has_generation_tags(template)


def test_a_template_that_is_not_jinja_is_an_error():
    with pytest.raises(SourceError, match=r"not valid Jinja.*line 1"):
        has_generation_tags("{% for m in messages %}")


def test_system_messages_are_folded_only_where_the_template_refuses_their_role_and_nothing_else():
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + PLAIN
    chat: list[Message] = [{"role": "system", "content": "w1"}, {"role": "user", "content": "hi"}]
    prepared = {text: Renderer(word_tokenizer(text)).prepare(chat) for text in (refusing, PLAIN, NEVER)}
    assert prepared == {refusing: [{"role": "user", "content": "w1\n\nhi"}], PLAIN: chat, NEVER: chat}


def test_one_of_several_templates_is_chosen_by_its_name():
    tokenizer = word_tokenizer()
    tokenizer.chat_template = {"default": PLAIN, "rag": TAGGED}
    with pytest.raises(SourceError, match=r"'rug' is neither .* nor one of the tokenizer's templates \(default, rag\)"):
        apply_chat_template_option(tokenizer, "rug")
    apply_chat_template_option(tokenizer, "rag")
    assert tokenizer.chat_template == TAGGED


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ strftime_now('%d %b %Y') }}", True),
        ("{% if never %}{{ strftime_now('%Y') }}{% endif %}", True),
        ("{% if strftime_now is defined %}{% generation %}a{% endgeneration %}{% endif %}", True),
        ("{# {{ strftime_now('%Y') }} #}strftime_now{{ 'strftime_now' }}", False),
        (PLAIN, False),
    ],
)
def test_a_template_may_ask_the_clock_where_it_uses_its_function(template, expected):
    assert may_ask_clock(template) == expected


def test_a_clock_says_midnight_of_its_day_without_a_time_zone():
    template = "{% macro day() %}{{ strftime_now(format='%d %B %Y %H:%M%z%Z') }}{% endmacro %}{{ day() }}"
    clock = Clock("2026-01-05")
    assert not clock.asked
    assert LimitedTemplate(template).render([], {CLOCK: clock}) == "05 January 2026 00:00"
    assert clock.asked
