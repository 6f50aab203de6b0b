"""The rule by which conversations become ids and masks is part of a store's identity, while its tokens are made."""

import pytest

from dspark_store.cli.precompute import parse_arguments
from dspark_store.format.ledger import state_ledger
from dspark_store.format.metadata import read_record
from dspark_store.format.storage import LocalStorage
from dspark_store.precompute import tokenise as tokenise_module
from dspark_store.precompute.__main__ import main
from dspark_store.precompute.job import plan_job
from tests.precompute.jobs import (
    arguments,
    contents,
    interrupted,
    precompute,
    refused,
    rule_1,
    states_of_files,
    write_rows,
)


@pytest.fixture(params=["chats", "blend"])
def data(request, chats):
    """Conversations as a source of their own, and as a part of a blend."""
    blend = f"[{{source: {chats}}}, {{source: {{type: dummy, samples: 3, max_length: 9}}}}]"
    return chats if request.param == "chats" else blend


def source_of(output):
    return read_record(LocalStorage(output)).manifest["source"]


def test_only_conversations_have_a_rule(job, tmp_path, chats):
    tokens = write_rows(tmp_path / "tokens.jsonl", [{"input_ids": [1, 2]}])
    sources = [chats, f"{{type: tokens, path: {tokens}}}", "{type: dummy, samples: 2}"]
    identities = [plan_job(parse_arguments(job(data=source))).source.identity() for source in sources]
    assert [identity.get("rule") for identity in identities] == [2, None, None]


def test_a_store_whose_tokens_are_all_there_is_gone_on_with_by_its_own_rule(job, data):
    with rule_1():
        output = interrupted(job(data=data))
        whole = contents(output)
    assert "rule" not in str(source_of(output))
    state_ledger(LocalStorage(output), read_record(LocalStorage(output)).schema).retract(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenise_module, "write_token_shard", None)
        assert main(job("--resume", data=data)) == 0
    assert "rule" not in str(source_of(output))
    finished = contents(output)
    assert all(finished[name] == whole[name] for name in whole if "/c." in name)


def test_a_complete_store_of_another_rule_is_left_alone(llama, data, tmp_path, capsys):
    with rule_1():
        output = precompute(llama, data, tmp_path / "store")
    before = states_of_files(output)
    assert main(arguments(llama, data, output, "--resume")) == 0
    assert "complete; nothing to do" in capsys.readouterr().out
    assert states_of_files(output) == before


@pytest.mark.usefixtures("no_target")
def test_a_store_whose_tokens_are_not_all_there_is_refused_with_the_reason(job, data, capsys):
    with rule_1():
        output = interrupted(job(data=data), tokenise_module, "settle_tokens")
    before = states_of_files(output)
    line = refused(job("--resume", data=data), capsys)
    assert "made by rule 1 for conversations; this version makes them by rule 2" in line
    assert "go on with the version that began the store, or begin a new one" in line
    assert states_of_files(output) == before


@pytest.mark.usefixtures("no_target")
def test_another_option_is_told_before_the_rule(job, chats, capsys):
    with rule_1():
        interrupted(job(), tokenise_module, "settle_tokens")
    line = refused(job("--resume", "--mask-headers"), capsys)
    assert "does not match this run in source.mask_headers: " in line
