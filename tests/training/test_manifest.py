import logging
from typing import Any

import pytest

from dspark_store.training.manifest import Expected, check_manifest

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
EXPECTED: dict[str, Any] = {
    "target_model": "org/target",
    "target_model_type": "qwen3",
    "target_vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 6,
    "seq_length": 8,
}


def test_a_store_that_is_as_expected_is_accepted_on_any_device():
    check_manifest(MANIFEST, Expected(**EXPECTED))
    check_manifest(MANIFEST, Expected())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("target_model_type", "llama"),
        ("target_vocab_size", 65),
        ("hidden_size", 16),
        ("num_hidden_layers", 7),
        ("seq_length", 16),
    ],
)
def test_a_field_that_differs_is_named(name, value):
    with pytest.raises(ValueError, match=f"^{name} of the store is"):
        check_manifest(MANIFEST, Expected(**{**EXPECTED, name: value}))


@pytest.mark.parametrize(
    ("name", "value"), [("dtype", "int4"), ("target_hidden_dim", 64), ("target_last_hidden_dim", 16)]
)
def test_a_manifest_that_contradicts_itself_is_refused(name, value):
    with pytest.raises(ValueError, match=name):
        check_manifest({**MANIFEST, name: value}, Expected())


@pytest.mark.parametrize("name", [name for name in MANIFEST if name != "target_model"])
def test_a_manifest_that_lacks_a_field_is_refused_in_words(name):
    with pytest.raises(ValueError, match=f"no {name}"):
        check_manifest({key: value for key, value in MANIFEST.items() if key != name}, Expected())


def test_another_name_of_the_target_is_but_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        check_manifest(MANIFEST, Expected(target_model="/elsewhere/target"))
    assert "'/elsewhere/target'" in caplog.text


def test_layers_may_be_a_subset_of_the_captured_ones():
    check_manifest(MANIFEST, Expected(layers=[5, 1]))
    with pytest.raises(ValueError, match="layer 2 was not captured"):
        check_manifest(MANIFEST, Expected(layers=[1, 2, 3]))
