import threading
import time

import pytest

from dspark_store.sources.chat import ChatSource
from dspark_store.sources.limits import ProcessorTimeError, RenderLimits, run_limited
from dspark_store.sources.messages import Message
from dspark_store.sources.options import ChatOptions
from dspark_store.sources.rendering import Renderer
from dspark_store.sources.source import SourceError
from tests.sources.words import PLAIN, TAGGED, word_tokenizer, write_rows

LOOP = "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}"
ENDLESS = [
    LOOP,
    "{% set items = range(90000) | list %}{% for a in items %}{% for b in items %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{{ f(n - 1) if n }}{{ f(n - 1) if n }}{% endmacro %}{{ f(60) }}",
    "{% set text %}{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}{% endset %}",
    "{{ lipsum(n=100000000) }}",
]
LONG = [
    "{% for a in range(90000) %}{% for b in range(90000) %}some text{% endfor %}{% endfor %}",
    "{% set text %}{% for a in range(9000) %}{{ 'a' * 9000 }}{% endfor %}{% endset %}{{ text }}",
    "{{ 'a' * 1000000000 }}",
    "{{ [1, 2] * 1000000000 }}",
    "{{ 9 ** 9 ** 9 }}",
    "{{ '%30000000d' % 1 }}",
    "{{ 'a' | center(30000000) }}",
]
LIMITS = RenderLimits(seconds=0.3, text_bytes=100_000)


def when(content, then):
    """Give a template that does something for one content only."""
    return PLAIN + "{% if messages[0].content == '" + content + "' %}" + then + "{% endif %}"


def rows(tmp_path, *contents):
    chats = [[{"role": "user", "content": content}, {"role": "assistant", "content": "ok"}] for content in contents]
    return write_rows(tmp_path / "chats.jsonl", *({"messages": chat} for chat in chats))


def source(tmp_path, template, limits=LIMITS, num_workers=0):
    options = ChatOptions(on_bad_row="skip", max_refused=1.0)
    path = rows(tmp_path, "hi", "bye", "yo")
    return ChatSource(path, word_tokenizer(template), options, seq_length=64, num_workers=num_workers, limits=limits)


@pytest.mark.parametrize("then", ENDLESS)
def test_a_template_that_does_not_end_ends_the_reading_and_names_the_row(tmp_path, then):
    with pytest.raises(SourceError, match=r"line 2.*more than 0\.3 s of processor time for the row"):
        list(source(tmp_path, when("bye", then)).read())


def test_a_row_that_does_not_end_is_named_by_workers_too(tmp_path):
    with pytest.raises(SourceError, match=r"line 2.*more than 0\.3 s of processor time"):
        list(source(tmp_path, when("bye", LOOP), num_workers=1).read())


def test_a_template_that_never_ends_is_refused_at_once():
    with pytest.raises(SourceError, match=r"more than 0\.3 s of processor time to render one short message"):
        Renderer(word_tokenizer(LOOP + PLAIN), limits=LIMITS)


@pytest.mark.parametrize("then", LONG)
def test_text_without_an_end_is_a_bad_row(tmp_path, then):
    chats = source(tmp_path, when("bye", then), RenderLimits(text_bytes=100_000))
    assert len(list(chats.read())) == 2
    assert chats.report().refused == 1


@pytest.mark.parametrize("template", [PLAIN, TAGGED])
def test_text_is_bounded_in_bytes(template):
    messages: list[Message] = [{"role": "user", "content": "\u00e9" * 60}, {"role": "assistant", "content": "a"}]
    renderer = Renderer(word_tokenizer(template), limits=RenderLimits(text_bytes=100))
    with pytest.raises(SourceError, match="more than 100 bytes of text"):
        renderer.render(messages, None)
    with pytest.raises(SourceError, match="more than 100 bytes of text"):
        renderer.render(messages, None, tagged=[])


def test_other_users_of_a_template_have_no_limit():
    tokenizer = word_tokenizer("{{ 'a ' * messages | length }}" + PLAIN)
    Renderer(tokenizer, limits=RenderLimits(text_bytes=100))
    messages = [{"role": "user", "content": "b" * 200}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == f"a <s> user {'b' * 200} </s> "


def spin():
    while True:
        pass


def test_a_call_is_ended_in_any_thread():
    ended = []

    def run():
        with pytest.raises(ProcessorTimeError, match=r"more than 0\.05 s"):
            run_limited(spin, 0.05)
        ended.append(True)

    thread = threading.Thread(target=run)
    thread.start()
    run()
    thread.join()
    assert ended == [True, True]


def test_time_in_which_a_call_waits_does_not_count():
    run_limited(lambda: time.sleep(0.5), 0.1)


def test_an_error_of_the_call_is_its_own():
    with pytest.raises(ZeroDivisionError):
        run_limited(lambda: 1 // 0, 10)


def test_calls_that_end_about_when_their_time_does_leave_nothing_behind():
    for step in range(12):

        def work(seconds=0.02 + 0.01 * step):
            end = time.thread_time() + seconds
            while time.thread_time() < end:
                pass
            return "done"

        try:
            assert run_limited(work, 0.06) == "done"
        except ProcessorTimeError:
            assert step > 3
    assert run_limited(lambda: "calm", 10) == "calm"
