import argparse

import pytest

from dspark_store.cli import tokens
from dspark_store.precompute.settings import settings
from dspark_store.sources.options import DEFAULT_OPTIONS, ChatOptions, option_values, options_identity, options_of
from dspark_store.sources.registry import SourceContext, SourceSpec, build_source
from dspark_store.sources.source import SourceError
from tests.sources.words import write_rows


def test_every_option_is_a_setting_of_the_job_and_a_flag_of_tokens_that_is_none_where_it_is_not_given():
    parser = argparse.ArgumentParser()
    tokens.add_arguments(parser)
    given = parser.parse_args(["chats.jsonl", "--tokenizer", "here"])
    for name in option_values(DEFAULT_OPTIONS):
        assert name in settings()
        assert getattr(given, name) is None
    assert options_of(given) == DEFAULT_OPTIONS


def test_options_that_are_not_given_are_no_part_of_the_identity():
    assert options_identity(ChatOptions(truncation_side="left")) == {
        "on_bad_row": "error",
        "over_long": "truncate",
        "truncation_side": "left",
        "min_supervised": 0,
        "mask_headers": False,
        "mask_reasoning_content": False,
    }
    assert "truncation_side" not in options_identity(DEFAULT_OPTIONS)


def test_an_option_that_older_stores_lack_is_part_of_the_identity_only_where_it_is_set():
    assert "mask_generation_prompt" not in options_identity(DEFAULT_OPTIONS)
    assert options_identity(ChatOptions(mask_generation_prompt=True))["mask_generation_prompt"] is True


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"over_long": "shorten"}, "over_long is 'shorten'; expected one of truncate, drop, split"),
        ({"max_refused": 2.0}, "max_refused is 2.0; expected a share from 0 to 1"),
        ({"min_supervised": -1}, "min_supervised is -1; expected 0 or more"),
    ],
)
def test_an_option_that_cannot_be_is_named(options, message):
    with pytest.raises(SourceError, match=message):
        ChatOptions(**options).check_options()


def test_rows_that_are_tokens_have_no_options_of_text_and_ignore_those_of_the_job(tmp_path):
    path = write_rows(tmp_path / "tokens.jsonl", {"input_ids": [1, 2]})
    job = SourceContext(seq_length=4, mask_headers=True, over_long="split")
    identity = build_source(SourceSpec("tokens", {"path": path, "over_long": None}), job).identity()
    assert (identity["mask_headers"], identity["over_long"]) == (False, "split")
    with pytest.raises(SourceError, match="type 'tokens' has no option 'mask_headers'; the nearest is"):
        build_source(SourceSpec("tokens", {"path": path, "mask_headers": True}), job)
