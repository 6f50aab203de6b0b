"""What is wrong with tokens whose objects, ledger row and index all agree."""

from dspark_store.readers.cache import open_cache
from dspark_store.readers.verify import verify_store
from tests.writers import small_store


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
