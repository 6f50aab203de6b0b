"""What is wrong inside of objects whose tails, ledger rows and checksums are all right."""

import pytest
import torch

from dspark_store.format.damage import Part
from dspark_store.format.schema import LAST, LAYERS, STATE_LEDGER
from dspark_store.format.shard import ObjectLabel
from dspark_store.readers.cache import open_cache
from dspark_store.readers.verify import verify_store
from dspark_store.writers.publish import complete_store
from dspark_store.writers.states import StateShardWriter
from tests.stores import build_store, write_states
from tests.writers import small_store


def problems_of(store):
    return verify_store(open_cache(store.path))


@pytest.mark.parametrize("codec", ["none", "default", "dense"])
def test_a_row_that_its_trailer_does_not_name_as_not_finite_is_a_problem(tmp_path, codec, monkeypatch):
    monkeypatch.setattr(StateShardWriter, "nonfinite_rows", lambda self: set())
    label = StateShardWriter._label
    monkeypatch.setattr(StateShardWriter, "_label", lambda self, item, rows: label(self, item, []))
    problems = problems_of(build_store(tmp_path, codec=codec, spoiled=4))
    by_key = {problem.key: problem for problem in problems}
    assert by_key.keys() == {f"{LAYERS}/c.1.0.0", "index/status/c.0"}
    assert all(problem.samples == (4,) for problem in problems)


def test_a_good_store_with_a_row_that_is_not_finite_has_no_problem(tmp_path):
    assert problems_of(build_store(tmp_path, spoiled=4)) == []


@pytest.mark.parametrize("extra", [1, 8])
def test_states_past_the_end_of_a_sample_are_a_problem(tmp_path, extra):
    """In its last chunk, or in a chunk that should not be there."""
    store = build_store(tmp_path, until="states", without_shards=(1,))
    members = list(store.samples[3:6])
    write = StateShardWriter.add

    def longer(self, row, layers, last):
        more = torch.zeros(extra if row == 1 else 0, last.shape[1], dtype=last.dtype)
        write(self, row, [torch.cat([layer, more]) for layer in layers], torch.cat([last, more]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StateShardWriter, "add", longer)
        write_states(store.storage, store.record, 1, members)
    complete_store(store.storage, store.record)
    problems = problems_of(store)
    assert {problem.samples for problem in problems} == {(4,)}
    assert {problem.part for problem in problems} == {Part.STATES}
    assert len(problems) == 4


def test_states_of_other_tokens_are_a_problem(tmp_path, monkeypatch):
    """The store is complete, so whoever completed it did not look."""
    monkeypatch.setattr("dspark_store.writers.publish._check_shard", lambda *_: (0, []))
    monkeypatch.setattr(
        StateShardWriter,
        "_label",
        lambda self, item, rows: ObjectLabel(
            self._record.store_id,
            tuple(self._record.schema.state_objects[slot].place(self._shard) for slot in (2, 3))
            if item.column == LAST
            else (item.place(self._shard),),
            self._rows,
            "0" * 32,
        ),
    )
    problems = problems_of(build_store(tmp_path))
    assert len(problems) == 12
    assert {problem.message for problem in problems} == {"was computed from other tokens than the store holds"}
    assert STATE_LEDGER not in {problem.key.partition("/c.")[0] for problem in problems}


def test_a_mask_of_other_values_than_0_and_1_is_a_problem_of_its_sample(tmp_path, monkeypatch):
    draw = small_store.random_tokens

    def with_a_two(lengths, seed):
        rows = draw(lengths, seed)
        if seed == 1:
            rows.masks[1][:] = 0
            rows.masks[1][3] = 2
        return rows

    monkeypatch.setattr(small_store, "random_tokens", with_a_two)
    (problem,) = verify_store(open_cache(small_store.write_small_store(tmp_path)))
    assert (problem.key, problem.samples) == ("loss_mask/c.1.0", (5,))
    assert problem.message == "slot 1: a mask holds 0 and 1, not 2"
