import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from dspark_store.sources.parts import PartSpec, parse_parts
from dspark_store.sources.registry import SourceContext, SourceSpec, build_source, parse_source, source_names
from dspark_store.sources.source import SourceError

A, B = SourceSpec("chat", {"path": "/a.jsonl"}), SourceSpec("chat", {"path": "/b.jsonl"})


@pytest.mark.parametrize(
    "value",
    [
        "30 /a.jsonl 70 /b.jsonl",
        [30, "/a.jsonl", 70, "/b.jsonl"],
        ["30", "/a.jsonl", "70", Path("/b.jsonl")],
        [[30, "/a.jsonl"], (70, Path("/b.jsonl"))],
        [{"weight": 30, "source": "/a.jsonl"}, {"weight": "70", "source": {"type": "chat", "path": "/b.jsonl"}}],
    ],
)
def test_every_form_of_a_blend_says_the_same(value):
    assert parse_parts(value) == [PartSpec(A, 30.0), PartSpec(B, 70.0)]


def test_a_blend_may_have_no_weights():
    assert parse_parts(["/a.jsonl", Path("/b.jsonl")]) == [PartSpec(A), PartSpec(B)]
    assert parse_parts([{"source": "/a.jsonl", "name": "first"}]) == [PartSpec(A, None, "first")]


def test_parts_of_a_blend_may_be_blends():
    (part,) = parse_parts([{"source": ["/a.jsonl", "/b.jsonl"]}])
    assert part.source == SourceSpec("blend", {"sources": ["/a.jsonl", "/b.jsonl"]})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "no sources"),
        ("", "no sources"),
        (3, "a list or text"),
        ([-1, "a", 2, "b"], "weight of part 0 .* -1"),
        (["nan", "a", 1, "b"], "weight of part 0 .* nan"),
        ([1, "a", float("inf"), "b"], "weight of part 1 .* inf"),
        ([[0, "a"], [0.0, "b"]], "every weight .* is 0"),
        ([1e308, "a", 1e308, "b"], "add up to inf"),
        ([1, "a", 2], "alternates weights and sources, got 3 items"),
        (["30", "a", "x", "b"], "weight of part 1 .* number, got 'x'"),
        ([True, "a", 1, "b"], "weight of part 0 .* number, got True"),
        ([[1, "a"], "b"], r"part 1 .* must be \[weight, source\]"),
        ([[1, "a", 3]], r"part 0 .* must be \[weight, source\]"),
        ([["x", "a"]], "weight of part 0 .* number, got 'x'"),
        ([{"weight": 1, "source": "a"}, "b"], r"part 1 .* must be \{weight, source\}"),
        ([{"weight": 1, "source": "a"}, {"source": "b"}], "part 1 .* has no weight"),
        ([{"weight": 1}], "part 0 .* has no 'source'"),
        ([{"wieght": 1, "source": "a"}], "'wieght'; the nearest is 'weight'"),
        ([{"source": "a", "name": 3}], "name of part 0"),
        ([1, 2, 3, 4], "a source is a path"),
    ],
)
def test_a_blend_that_cannot_be_is_refused_in_one_line(value, message):
    with pytest.raises(SourceError, match=message) as caught:
        parse_parts(value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("value", "kind"),
    [("/c/x.jsonl", "chat"), ("org/name", "chat"), ("/c/x.idx", "megatron"), ("/c/x.bin", "megatron")],
)
def test_a_path_has_the_type_of_its_name(value, kind):
    assert parse_source(value) == parse_source(Path(value)) == SourceSpec(kind, {"path": value})


def test_the_prefix_of_an_index_pair_is_one(tmp_path):
    (tmp_path / "wiki.idx").touch()
    assert parse_source(tmp_path / "wiki").type == "megatron"


def test_text_that_begins_with_a_number_is_a_blend_unless_there_is_such_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert parse_source("2024 corpus").type == "blend"
    (tmp_path / "2024 corpus").touch()
    assert parse_source("2024 corpus") == SourceSpec("chat", {"path": "2024 corpus"})
    assert parse_source("my corpus") == SourceSpec("chat", {"path": "my corpus"})


def test_a_mapping_names_its_type():
    assert parse_source({"type": "dummy", "samples": 3}) == SourceSpec("dummy", {"samples": 3})


@pytest.mark.parametrize("value", ["", None, 3, {"path": "x"}, {"type": 3}])
def test_what_is_no_source_is_refused(value):
    with pytest.raises(SourceError, match="a source"):
        parse_source(value)


def test_the_tokenizer_is_loaded_once_and_only_when_it_is_needed():
    load = Mock()
    context = SourceContext(seq_length=8, load_tokenizer=load)
    load.assert_not_called()
    assert context.tokenizer("chat") is replace(context, seq_length=4).tokenizer("chat") is load.return_value
    load.assert_called_once_with()


def test_a_source_that_needs_a_tokenizer_says_so():
    with pytest.raises(SourceError, match="'chat' needs a tokenizer"):
        SourceContext(seq_length=8).tokenizer("chat")


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
