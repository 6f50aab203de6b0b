import sys

import pytest

from dspark_store.sources.registry import build_source, source_names
from dspark_store.sources.source import SourceError
from dspark_store.sources.specs import SourceContext, SourceSpec

CONTEXT = SourceContext(seq_length=8)


def build(kind, **options):
    return build_source(SourceSpec(kind, options), CONTEXT)


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Return what installs a distribution that registers sources, each by `name = module:function`."""

    def write(distribution, *entries):
        info = tmp_path / f"{distribution}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("\n".join(["[dspark_store.sources]", *entries]))

    (tmp_path / "pebbles_source.py").write_text(
        "from collections.abc import Sequence\n"
        "from typing import Literal\n"
        "NUMBER = 3\n"
        "def build(context, *, count, colour='grey'):\n"
        "    return (context.seq_length, count, colour)\n"
        "Mode = Literal['a', 'b']\n"
        "def typed(context, *, size: float = 1.0, names: 'Sequence[str] | None' = None, mode: Mode = 'a'):\n"
        "    return (size, names, mode)\n"
        "def odd(context, *, size: 'Nowhere' = 1):\n"
        "    return size\n"
        "def anything(context, **options):\n"
        "    return options\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield write
    sys.modules.pop("pebbles_source", None)


def test_a_source_is_built_by_name():
    assert len(build("dummy", samples=3)) == 3


def test_the_sources_of_other_packages_are_built_by_name_too(install):
    install("pebbles", "pebbles = pebbles_source:build", "anything = pebbles_source:anything")
    assert build("pebbles", count=2) == (8, 2, "grey")
    assert build("anything", size=1) == {"size": 1}
    assert source_names() == ["anything", "blend", "chat", "dummy", "megatron", "pebbles", "tokens"]


def test_nothing_is_imported_before_its_name_is_asked_for(install):
    install("pebbles", "pebbles = pebbles_source:build")
    source_names()
    build("dummy")
    assert "pebbles_source" not in sys.modules


def test_an_unknown_name_is_refused_with_the_nearest_and_all():
    with pytest.raises(SourceError, match="'dumy' is unknown; the nearest is 'dummy'; there are blend, chat, dummy, "):
        build("dumy")


def test_an_unknown_option_is_refused_with_the_nearest():
    with pytest.raises(SourceError, match="type 'dummy' has no option 'vocabulary'; the nearest is 'vocab'"):
        build("dummy", vocabulary=3)


def test_the_context_is_no_option():
    with pytest.raises(SourceError, match="has no option 'context'"):
        build("dummy", context=3)


def test_an_option_that_must_be_given_is_missed(install):
    install("pebbles", "pebbles = pebbles_source:build")
    with pytest.raises(SourceError, match="type 'pebbles' needs the option 'count'"):
        build("pebbles", colour="red")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"size": "3"}, "a number"),
        ({"size": True}, "a number"),
        ({"names": "x"}, "a list or none"),
        ({"mode": "c"}, "'a' or 'b'"),
    ],
)
def test_an_option_of_another_type_is_refused(install, options, expected):
    install("pebbles", "typed = pebbles_source:typed")
    ((name, value),) = options.items()
    with pytest.raises(
        SourceError, match=f"option '{name}' of a source of type 'typed' is {value!r}; expected {expected}"
    ):
        build("typed", **options)


def test_options_of_the_right_types_are_passed_on(install):
    install("pebbles", "typed = pebbles_source:typed", "odd = pebbles_source:odd")
    assert build("typed", size=2, names=["x"], mode="b") == (2, ["x"], "b")
    assert build("odd", size="any") == "any"


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([("grey", "dummy = pebbles_source:build")], "'dummy' of grey has the name of a built-in one"),
        ([("grey", "x = pebbles_source:NUMBER")], "'x' of grey is no function"),
        (
            [("grey", "x = pebbles_source:build"), ("red", "x = pebbles_source:anything")],
            "'x' is registered by grey and red",
        ),
    ],
)
def test_a_registration_that_cannot_be_is_refused(install, entries, message):
    for distribution, entry in entries:
        install(distribution, entry)
    with pytest.raises(SourceError, match=message):
        build(entries[0][1].split()[0], count=1)
