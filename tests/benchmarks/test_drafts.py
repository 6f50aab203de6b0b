"""The benchmarks of training: what they print is what trainings did."""

import json
import math

import numpy as np
import pytest
import torch

from benchmarks import drafts, online
from benchmarks.drafts import Bigram
from benchmarks.online import TrainingSummary
from benchmarks.tables import load_outcome
from dspark_store.cli.train import parse_arguments
from dspark_store.draft.anchors import draw_blocks, sample_keys
from dspark_store.inspection.copy_plan import CopySettings
from dspark_store.inspection.rechunk import rechunk
from dspark_store.readers.cache import open_cache
from dspark_store.training.journal import read_metrics
from dspark_store.training.loop import Training
from dspark_store.training.ranks import Ranks
from tests.precompute.jobs import precompute, states_of_files
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
        lines = read_metrics(tmp_path / "out" / f"seed-{seed}")
        taus = [line.figures["tau"] for line in lines if line.kind == "validation"]
        assert [result["untrained"], result["trained"]] == [taus[0], taus[-1]]
        assert result["steps"] == 3
        assert row.split()[:5] == [
            str(seed),
            "3",
            *(f"{result[name]:.3f}" for name in ("untrained", "bigram", "trained")),
        ]
    assert results[0]["trained"] != results[1]["trained"]


def test_paired_drafts_differ_by_their_states_alone_and_are_trained_once(store, tmp_path, monkeypatch):
    copy, rough = tmp_path / "copy", tmp_path / "rough"
    rechunk(store, copy, CopySettings(codec="fast", shard_size=3))
    own = ["--out", str(tmp_path / "out"), "--seeds", "1", "2", "--until", "inf"]
    monkeypatch.setattr(drafts, "LEAST_SEEDS", 1)
    told = [str(store), str(copy), *own, "--fp8", str(rough), "--json", str(tmp_path / "drafts.json"), *FLAGS]
    assert drafts.main([*told, "--validation-fraction", "0.4"]) == 0
    costs, places, errors = load_outcome(tmp_path / "drafts.json").tables
    exact, same, fp8 = costs.rows
    assert [row[0] for row in costs.rows] == ["store", "copy", "rough"]
    assert same[3:6] == (0.0, exact[4], 0.0)
    assert fp8[4] != exact[4]
    schema = open_cache(store).schema
    assert fp8[1] == schema.num_layers * (schema.hidden_size + 4) + 5  # the last layer is the last hidden state
    assert places.rows[0][1:] == places.rows[1][1:] != places.rows[2][1:]
    assert set(errors.rows[0][1:]) == {0.0}
    assert np.array(errors.rows[1][1:], float) == pytest.approx(0.024, abs=0.012)  # three mantissa bits
    assert not (tmp_path / "out" / "copy" / "seed-2").exists()
    states = states_of_files(tmp_path / "out")
    assert drafts.main([*told, "--validation-fraction", "0.4"]) == 0
    assert states_of_files(tmp_path / "out") == states


def test_an_interval_is_students():
    assert drafts.interval([0.01, 0.02, 0.03]) == pytest.approx((0.02, 0.02 - 0.024843, 0.02 + 0.024843), abs=1e-5)
    assert drafts.interval([0.01]) == (0.01, -math.inf, math.inf)


def test_a_bigram_that_knows_the_next_token_is_worth_what_the_target_gives_it(store, tmp_path, monkeypatch):
    """Sure of the label in every slot, it is accepted with the target's own probability of the label."""
    flags = ["--store", str(store), "--output-dir", str(tmp_path), *FLAGS[1:], "--validation-fraction", "0.4"]
    config = parse_arguments(flags)
    training = Training(config, Ranks(0, 1, torch.device("cpu")), None)
    draft, asked, tokens, blocks_seen = training.learner.draft, [], 0.0, 0
    assert training.data.validation is not None
    for batch in training.data.validation:
        keys = sample_keys(batch["sample"], batch["input_ids"].shape[1], seed=config.seed, epoch=0)
        blocks = draw_blocks(
            batch["input_ids"], batch["loss_mask"], keys, num_anchors=config.num_anchors, block_size=config.block_size
        )
        own = draft.head_logits(draft.teacher_states(batch["target_last_hidden_states"], blocks)).softmax(-1)
        right = own.gather(-1, blocks.labels[..., None])[..., 0] * blocks.supervised
        tokens += float(((1 + right.cumprod(2).sum(2)) * blocks.live).sum())
        blocks_seen += int(blocks.live.sum())
        asked.append(blocks.labels)
    training.data.validation.set_epoch(0)
    assert training._journal is not None
    training._journal.close()

    def sure(self, previous, added):
        labels = asked.pop(0).ravel().numpy()
        return np.log(np.eye(self.vocab_size, dtype=np.float32)[labels] + 1e-9)

    monkeypatch.setattr(Bigram, "log_probabilities", sure)
    assert drafts.tau_of_bigram(training, Bigram.of([], draft.settings.vocab_size), 1.0) == pytest.approx(
        tokens / blocks_seen, rel=1e-4
    )


def test_a_training_that_does_not_judge_the_untrained_draft_is_refused_before_it_begins(store, tmp_path):
    with pytest.raises(ValueError, match="the untrained draft is not judged"):
        drafts.measure(str(store), tmp_path / "out", 1, [*FLAGS[1:], "--validate-every", "0"])
    assert not (tmp_path / "out").exists()


def test_online_and_stored_trainings_are_told_beside_each_other(store, capsys):
    assert online.main([str(store), *FLAGS]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("3 steps ")
    assert lines[-1].startswith("losses differ by at most ")


@pytest.mark.parametrize(("loss", "code"), [(2.0, 0), (2.1, 1)])
def test_what_was_saved_is_online_less_stored(store, capsys, monkeypatch, loss, code):
    def trained(output, kind, *given):
        live = kind == "--online"
        output.mkdir()
        line = {"kind": "train", "step": 1, "loss": loss if live else 2.0}
        (output / "metrics.jsonl").write_text(json.dumps(line) + "\n")
        return TrainingSummary(3, 50, 0.5, 2.5e9) if live else TrainingSummary(3, 20, 0.01, 1.5e9)

    monkeypatch.setattr(online, "_trained", trained)
    assert online.main([str(store), *FLAGS]) == code
    words = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert words[1][-2:] == ["20", "50"]
    assert words[2][-2:] == ["1.0%", "50.0%"]
    assert words[3][-2:] == ["1,500", "2,500"]
    assert words[5][:4] == ["memory", "saved:", "1,000", "MB;"]


def test_the_weights_of_the_decoder_layers_are_counted(store):
    model = tiny_llama()
    weights = sum(weight.nbytes for weight in model.model.layers.parameters())
    assert weights > 0
    assert next(model.parameters()).dtype == torch.float32
    assert online.layer_bytes(open_cache(store)) == weights


def test_a_summary_is_read_from_what_a_training_prints():
    printed = "60 steps in 831 s; waited for data 0.1% of the steps' time; at most 1.45 GB of memory\nvalidation: ..."
    assert TrainingSummary.of(printed) == TrainingSummary(60, 831, 0.1 / 100, 1.45e9)
    with pytest.raises(ValueError, match="printed no summary"):
        TrainingSummary.of("nothing is left to do")


def test_pairs_are_counted_and_a_count_is_added_to_each():
    bigram = Bigram.of([np.array([1, 2, 1, 2, 0]), np.array([1, 3])], vocab_size=4)
    after_one = np.exp(bigram.log_probabilities(np.array([1]), 0.5))[0]
    assert after_one == pytest.approx([0.5 / 5, 0.5 / 5, 2.5 / 5, 1.5 / 5])


def test_a_token_that_nothing_follows_says_nothing():
    bigram = Bigram.of([np.array([1, 2])], vocab_size=4)
    assert np.exp(bigram.log_probabilities(np.array([3]), 1.0))[0] == pytest.approx([0.25] * 4)


def test_every_row_is_a_distribution():
    rows = [np.random.default_rng(seed).integers(0, 50, 40) for seed in range(5)]
    bigram = Bigram.of(rows, vocab_size=50)
    assert np.exp(bigram.log_probabilities(np.arange(50), 0.01)).sum(axis=1) == pytest.approx(np.ones(50), rel=1e-5)
