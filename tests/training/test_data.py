import logging
import shutil
from typing import Any

import numpy as np
import pytest
import torch

from dspark_store.cli.train import parse_arguments
from dspark_store.training.data import ExpectedStore, check_manifest, open_data, target_tables
from dspark_store.training.learner import Learner
from dspark_store.training.loop import Training
from dspark_store.training.ranks import Ranks
from tests.precompute.jobs import precompute
from tests.tiny import save_target_dir, tiny_gemma4_nested, tiny_llama, write_chats
from tests.training.runs import flags, run, write_online

MANIFEST: dict[str, Any] = {
    "target_model": "org/target",
    "target_model_type": "qwen3",
    "target_vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 6,
    "seq_length": 8,
    "dtype": "bf16",
    "target_hidden_dim": 96,
    "target_last_hidden_dim": 32,
    "target_layer_ids": [1, 3, 5],
}
EXPECTED: dict[str, Any] = dict(list(MANIFEST.items())[:6])


def test_a_store_that_is_as_expected_is_accepted_on_any_device():
    check_manifest(MANIFEST, ExpectedStore(**EXPECTED))
    check_manifest(MANIFEST, ExpectedStore())


@pytest.mark.parametrize("name", [name for name in EXPECTED if name != "target_model"])
def test_a_field_that_differs_is_named(name):
    with pytest.raises(ValueError, match=f"^{name} of the store is"):
        check_manifest(MANIFEST, ExpectedStore(**{**EXPECTED, name: "another"}))


@pytest.mark.parametrize(
    ("name", "value"), [("dtype", "int4"), ("target_hidden_dim", 64), ("target_last_hidden_dim", 16)]
)
def test_a_manifest_that_contradicts_itself_is_refused(name, value):
    with pytest.raises(ValueError, match=name):
        check_manifest({**MANIFEST, name: value}, ExpectedStore())


@pytest.mark.parametrize("name", [name for name in MANIFEST if name != "target_model"])
def test_a_manifest_that_lacks_a_field_is_refused_in_words(name):
    with pytest.raises(ValueError, match=f"no {name}"):
        check_manifest({key: value for key, value in MANIFEST.items() if key != name}, ExpectedStore())


def test_another_name_of_the_target_is_but_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        check_manifest(MANIFEST, ExpectedStore(target_model="/elsewhere/target"))
    assert "'/elsewhere/target'" in caplog.text


def test_a_store_that_is_rounded_is_told_to_be_lossy(caplog):
    with caplog.at_level(logging.WARNING):
        check_manifest(MANIFEST, ExpectedStore())
        assert not caplog.text
        check_manifest({**MANIFEST, "mantissa_bits": 3}, ExpectedStore())
        check_manifest({**MANIFEST, "state_dtype": "int8"}, ExpectedStore())
    assert "rounded to 3 of 7 mantissa bits" in caplog.text
    assert "its states are int8 codes" in caplog.text


def test_layers_may_be_a_subset_of_the_captured_ones():
    check_manifest(MANIFEST, ExpectedStore(layers=[5, 1]))
    with pytest.raises(ValueError, match="layer 2 was not captured"):
        check_manifest(MANIFEST, ExpectedStore(layers=[1, 2, 3]))


CPU = torch.device("cpu")
ALONE = Ranks(0, 1, CPU)


def opened(output, *more, ranks=ALONE):
    return open_data(parse_arguments(flags(output, *more)), ranks)


def test_a_store_of_a_nested_target_is_of_its_text_configuration(chats, tmp_path):
    target = save_target_dir(tmp_path / "target", tiny_gemma4_nested())
    store = precompute(target, chats, tmp_path / "store")
    data = opened(tmp_path / "run", "--store", store, "--target-model", target)
    assert data.cache.manifest["target_model_type"] == "gemma4_text"
    with pytest.raises(ValueError, match="target_model_type of the store is 'gemma4_text', this run expects 'llama'"):
        opened(tmp_path / "run", "--store", store, "--target-model", save_target_dir(tmp_path / "llama"))


@pytest.fixture(scope="module")
def cut(llama, chats, tmp_path_factory):
    """The store of the target's first two layers, of four."""
    return precompute(llama, chats, tmp_path_factory.mktemp("cut") / "store", "--target-num-hidden-layers", 2)


def test_a_store_of_a_cut_target_is_used_only_where_that_is_asked_for(cut, llama, tmp_path):
    given = (tmp_path / "run", "--store", cut, "--target-model", llama)
    with pytest.raises(ValueError, match="cut to its first 2 of 4 layers"):
        opened(*given)
    assert opened(*given, "--allow-reduced-depth").cache.manifest["num_hidden_layers"] == 2


def test_of_a_cut_target_the_whole_depth_is_compared(cut, tmp_path):
    shallow = save_target_dir(tmp_path / "shallow", tiny_llama(num_hidden_layers=2))
    with pytest.raises(ValueError, match="num_hidden_layers of the store is 4, this run expects 2"):
        opened(tmp_path / "run", "--store", cut, "--target-model", shallow, "--allow-reduced-depth")


def test_a_live_target_is_cut_only_where_that_is_asked_for(llama, chats, tmp_path):
    file = write_online(tmp_path / "job.yaml", llama, chats, target_num_hidden_layers=2)
    with pytest.raises(ValueError, match="cuts the target to its first 2 of 4 layers"):
        opened(tmp_path / "run", "--online", file)
    assert not (tmp_path / "run").exists()
    data = opened(tmp_path / "run", "--online", file, "--target-model", llama, "--allow-reduced-depth")
    assert data.cache.manifest["target_num_hidden_layers_full"] == 4


def test_samples_are_trained_on_or_validated_with_and_never_both(store, tmp_path):
    data = opened(tmp_path / "run", "--store", store, "--validation-fraction", 0.3)
    assert data.validation is not None
    trained, validated = set(data.train.samples.tolist()), set(data.validation.samples.tolist())
    assert trained
    assert validated
    assert not trained & validated
    assert trained | validated == set(opened(tmp_path / "run", "--store", store).train.samples.tolist())


def test_no_step_sees_a_validation_sample(store, tmp_path):
    seen: dict[str, set[int]] = {"accumulate": set(), "validate": set()}

    def noted(name):
        real = getattr(Learner, name)

        def call(self, batch, *more, **named):
            seen[name].update(batch["sample"].tolist())
            return real(self, batch, *more, **named)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in seen:
            patch.setattr(Learner, name, noted(name))
        run(tmp_path / "run", "--store", store, "--validation-fraction", 0.3, "--epochs", 2)
    assert seen["accumulate"]
    assert seen["validate"]
    assert not seen["accumulate"] & seen["validate"]


def test_the_global_batches_of_an_epoch_do_not_depend_on_the_number_of_ranks(store, tmp_path):
    """Eleven samples in global batches of four: the last one begins the order again."""

    def batches(ranks, size):
        loaders = [
            opened(tmp_path / "run", "--store", store, "--batch-size", size, ranks=Ranks(rank, ranks, CPU)).train
            for rank in range(ranks)
        ]
        return [np.concatenate(parts) for parts in zip(*(split(loader, size) for loader in loaders), strict=True)]

    def split(loader, size):
        samples = loader.epoch_samples()
        return [samples[start : start + size] for start in range(0, len(samples), size)]

    one, two, four = batches(1, 4), batches(2, 2), batches(4, 1)
    assert [len(batch) for batch in one] == [4, 4, 4]
    for batch, *others in zip(one, two, four, strict=True):
        assert all(np.array_equal(batch, other) for other in others)


def test_a_store_of_one_sample_is_all_that_a_training_needs(tmp_path):
    """No file of the target is there any more, its tokenizer and template included."""
    target = save_target_dir(tmp_path / "target", tiny_llama())
    store = precompute(target, write_chats(tmp_path / "one.jsonl", 1), tmp_path / "store")
    shutil.rmtree(target)
    training = Training(parse_arguments(flags(tmp_path / "run", "--store", store)), ALONE, None)
    assert len(training.data.train) == 1
    stored = training.data.cache.weights()
    assert torch.equal(training.learner.draft.embed, stored.embed)
    assert torch.equal(training.learner.draft.head, stored.head)
    training.run()
    assert training.learner.step == 1


def test_a_tied_head_is_one_tensor_with_the_embedding(chats, tmp_path):
    target = save_target_dir(tmp_path / "target", tiny_llama(tie_word_embeddings=True))
    store = precompute(target, chats, tmp_path / "store")
    embed, head, bias = target_tables(opened(tmp_path / "run", "--store", store).cache, CPU, torch.bfloat16)
    assert head is embed
    assert bias is None
