"""The benchmarks of training: what they print is what trainings did."""

import json

import pytest
import torch

from benchmarks import drafts, online
from benchmarks.online import Summary
from dspark_store.readers.cache import open_cache
from tests.precompute.jobs import precompute
from tests.tiny import save_target_dir, tiny_llama, write_chats
from tests.training.runs import DRAFT, MASK_TOKEN

STEPS = ("--epochs", 3, "--max-steps", 3, "--batch-size", 2, "--log-every", 1)
FLAGS = [str(word) for word in ("--", "--mask-token-id", MASK_TOKEN, *DRAFT, *STEPS, "--device", "cpu")]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    directory = tmp_path_factory.mktemp("drafts")
    target = save_target_dir(directory / "target", tiny_llama())
    return precompute(target, write_chats(directory / "chats.jsonl", 11), directory / "store")


def test_drafts_are_judged_untrained_and_trained_beside_a_bigram(store, tmp_path, capsys):
    told = ["--out", str(tmp_path / "out"), "--seeds", "1", "2", "--json", str(tmp_path / "drafts.json")]
    assert drafts.main([str(store), *told, *FLAGS, "--validation-fraction", "0.4"]) == 0
    results = json.loads((tmp_path / "drafts.json").read_text())
    table = capsys.readouterr().out.splitlines()[-2:]
    for seed, result, row in zip((1, 2), results, table, strict=True):
        lines = (tmp_path / "out" / f"seed-{seed}" / "metrics.jsonl").read_text().splitlines()
        taus = [line["tau"] for line in map(json.loads, lines) if line["kind"] == "validation"]
        assert [result["untrained"], result["trained"]] == [taus[0], taus[-1]]
        assert result["steps"] == 3
        assert 1 <= result["bigram"] <= 4
        assert row.split()[:2] == [str(seed), "3"]
    assert results[0] != results[1]


def test_a_training_that_does_not_judge_the_untrained_draft_is_refused(store, tmp_path):
    with pytest.raises(ValueError, match="the untrained draft was not judged"):
        drafts.measure(str(store), tmp_path, 1, [*FLAGS[1:], "--validation-fraction", "0.4", "--validate-every", "0"])


def test_online_and_stored_trainings_are_told_beside_each_other(store, capsys):
    assert online.main([str(store), *FLAGS]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("3 steps ")
    assert lines[-1].startswith("losses differ by at most ")
    assert float(lines[-1].split()[-1]) < 1e-4


def test_the_weights_of_the_decoder_layers_are_counted(store):
    model = tiny_llama()
    weights = sum(weight.nbytes for weight in model.model.layers.parameters())
    assert weights > 0
    assert next(model.parameters()).dtype == torch.float32
    assert online.layer_bytes(open_cache(store)) == weights


def test_a_summary_is_read_from_what_a_training_prints():
    printed = "60 steps in 831 s; waited for data 0.1% of the steps' time; at most 1.45 GB of memory\nvalidation: ..."
    assert Summary.of(printed) == Summary(60, 831, 0.1 / 100, 1.45e9)
    with pytest.raises(ValueError, match="printed no summary"):
        Summary.of("nothing is left to do")
