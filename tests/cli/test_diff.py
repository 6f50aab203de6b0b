"""``dspark-store diff``: what is the same, what is not, and the exit code."""

import json
from pathlib import Path

import pytest

from dspark_store.cli.main import main
from tests import stores
from tests.stores import Shape, build_store, flip

MANIFEST = {
    "pad_token_id": 5,
    "target_model": "here",
    "target_weights": "0" * 64,
    "dtype": "bf16",
    "source": {"type": "chat"},
}


@pytest.fixture
def two(tmp_path):
    """Make two stores, of which the second is changed."""

    def make(**changes):
        place = tmp_path / str(len(list(tmp_path.iterdir())))
        build_store(place / "a", fields={"manifest": MANIFEST})
        changes.setdefault("fields", {"manifest": MANIFEST})
        build_store(place / "b", **changes)
        return str(place / "a"), str(place / "b")

    return make


def diff(pair, capsys, *options):
    """Compare both ways round; return the exit code and the answer the first way, mirrored in the second."""
    code = main(["diff", *pair, "--json", *options])
    one = json.loads(capsys.readouterr().out)
    assert main(["diff", *reversed(pair), "--json", *options]) == code
    other = json.loads(capsys.readouterr().out)
    assert one["samples"]["only_a"] == other["samples"]["only_b"]
    assert one["states"]["compared"] == other["states"]["compared"]
    assert one["states"]["layers_only_b"] == other["states"]["layers_only_a"]
    assert sorted(map(str, one["states"]["layers"])) == sorted(map(str, other["states"]["layers"]))
    assert one["equal"] == other["equal"] == (code == 0)
    return code, one


def differing(answer):
    return {layer["layer_id"]: layer["largest"] for layer in answer["states"]["layers"] if layer["unequal"]}


def test_a_store_equals_itself(two, capsys):
    a, _ = two()
    assert main(["diff", a, a]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert "samples   7 in both" in shown
    assert "states    7 samples compared, 7 equal bit by bit" in shown
    assert shown[-1] == "verdict   equal"


def test_codec_chunks_and_shards_are_layout_and_no_difference(two, capsys):
    code, found = diff(two(codec="none", shape=Shape(shard_size=2, chunk_tokens=5)), capsys)
    assert code == 0
    assert {field["field"] for field in found["layout"]} == {"codec", "shard_size", "chunk_tokens"}
    assert (found["identity"], found["states"]["equal"], found["weights"]) == ([], 7, [])


def test_recorded_fields_are_told_and_no_difference(two, capsys):
    code, found = diff(two(fields={"manifest": {**MANIFEST, "target_model": "there"}}), capsys)
    assert code == 0
    assert found["recorded"] == [{"field": "target_model", "a": "here", "b": "there"}]


def test_identity_is_named_field_by_field(two, capsys):
    manifest = {**MANIFEST, "batch_size": 8, "source": {"type": "chat", "split": "train[:3]"}}
    code, found = diff(two(fields={"manifest": manifest, "head": {"logit_scale": 2.0}}), capsys)
    assert code == 1
    assert found["identity"] == [
        {"field": "batch_size", "a": None, "b": 8},
        {"field": "source.split", "a": None, "b": "train[:3]"},
        {"field": "head.logit_scale", "a": None, "b": 2.0},
    ]


def test_a_state_that_differs_is_named_with_its_layer_and_sample(two, capsys):
    pair = two(spoiled=4)
    assert main(["diff", *pair]) == 1
    shown = capsys.readouterr().out
    assert "states    layer 2: largest difference inf, 1 samples differ\n" in shown
    assert "states    layer -1: equal\n" in shown
    assert "worst     sample 4 of A, 4 of B: inf\n" in shown
    code, found = diff(pair, capsys)
    assert (code, differing(found)) == (1, {2: "inf"})
    assert found["states"]["equal"] == 6
    assert diff(pair, capsys, "--layers", "5", "-1")[0] == 0


def test_dtypes_are_compared_as_float32(two, capsys):
    code, found = diff(two(dtype="fp32", fields={"manifest": {**MANIFEST, "dtype": "fp32"}}), capsys)
    assert code == 1
    assert [field["field"] for field in found["identity"]] == ["dtype"]
    assert found["states"]["exact"] is False
    assert all(0 < difference < 0.13 for difference in differing(found).values())
    assert {table["path"] for table in found["weights"]} == {"target/embed_tokens/weight", "target/lm_head/weight"}


def test_layers_that_one_store_lacks_are_named_and_the_others_compared(two, capsys):
    code, found = diff(two(shape=Shape(layer_ids=(2, 5))), capsys)
    assert code == 1
    assert (found["states"]["layers_only_a"], found["states"]["layers_only_b"]) == ([-1], [])
    assert {layer["layer_id"] for layer in found["states"]["layers"]} == {2, 5, None}


def permuted(monkeypatch, order):
    make = stores.make_sample
    monkeypatch.setattr(stores, "make_sample", lambda index, *rest: make(order[index], *rest))
    return [stores.RAGGED[place] for place in order]


def test_samples_are_found_at_another_place_and_duplicates_are_told(tmp_path, monkeypatch, capsys):
    build_store(tmp_path / "a")
    lengths = permuted(monkeypatch, [0, 2, 1, 1, 6, 5, 4, 3])
    build_store(tmp_path / "b", lengths=lengths)
    code, found = diff((str(tmp_path / "a"), str(tmp_path / "b")), capsys)
    assert code == 1
    assert found["samples"] == {"both": 7, "moved": 5, "only_a": [], "only_b": [3]}
    assert (found["states"]["compared"], found["states"]["equal"]) == (7, 7)


def test_growing_stores_are_compared_as_far_as_both_are_captured(two, capsys):
    pair = two(without_shards=(1,))
    code, found = diff(pair, capsys)
    assert code == 0
    assert (found["samples"]["both"], found["states"]["comparable"], found["states"]["equal"]) == (7, 4, 4)
    main(["diff", *pair])
    assert "4 equal bit by bit; 3 are not captured in both\n" in capsys.readouterr().out


def test_nothing_to_compare_is_an_error_and_no_success(two, capsys):
    assert main(["diff", *two(without_shards=(0, 1, 2))]) == 2
    assert "error: nothing to compare yet" in capsys.readouterr().err
    assert main(["diff", *two(until="tokens")]) == 2
    assert "still in its token phase" in capsys.readouterr().err


def test_some_samples_are_compared_where_that_is_asked(two, capsys):
    code, found = diff(two(), capsys, "--samples", "3", "--threads", "1")
    assert (code, found["states"]["compared"], found["states"]["comparable"]) == (0, 3, 7)


def test_tables_that_differ_are_named(two, capsys):
    code, found = diff(two(tied=True), capsys)
    assert code == 1
    (table,) = found["weights"]
    assert table["path"] == "target/lm_head/weight"
    assert table["largest"] > 1
    code, found = diff(two(weights=False), capsys)
    assert (code, [table["reason"] for table in found["weights"]]) == (1, ["only in A", "only in A"])


def test_damage_is_an_error_that_names_the_object(two, capsys):
    a, b = two()
    flip(Path(b) / "target_hidden_states" / "c.1.0.0", 40)
    assert main(["diff", a, b]) == 1
    assert "target_hidden_states/c.1.0.0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--layers", "4"], "layer 4 is not in both"), (["--samples", "0"], "samples must be >= 1, got 0")],
)
def test_mistakes_are_one_line_and_exit_code_2(two, capsys, options, message):
    assert main(["diff", *two(), *options]) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")
