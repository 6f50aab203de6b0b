import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_store.sources.row_order import select_automodels_rows, select_rows
from dspark_store.sources.source import SourceError


def rows(count=6, split=None, shuffle_seed=None, max_samples=None):
    return list(select_rows(count, split=split, shuffle_seed=shuffle_seed, max_samples=max_samples))


def test_without_options_it_is_the_order_of_the_file():
    assert rows() == [0, 1, 2, 3, 4, 5]


def test_the_permutation_of_a_seed_is_pinned():
    assert rows(10, shuffle_seed=42) == [5, 6, 0, 7, 3, 2, 4, 9, 1, 8]
    assert rows(10, shuffle_seed=0) == [4, 6, 2, 7, 3, 5, 9, 0, 8, 1]


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        ("train[:2]", [0, 1]),
        ("train[4:]", [4, 5]),
        ("a_1[1:3]", [1, 2]),
        ("train[:]", rows()),
        ("train", rows()),
        ("t[5:99]", [5]),
        ("train[-2:]", [4, 5]),
        ("train[:-4]", [0, 1]),
        ("train-sft[:2]", [0, 1]),
        ("train[:34%]", [0, 1]),
        ("train[34%:100%]", [2, 3, 4, 5]),
        ("train[-50%:]", [3, 4, 5]),
    ],
)
def test_a_slice_takes_its_rows(split, expected):
    assert rows(split=split) == expected


@pytest.mark.parametrize("split", ["train[:101%]", "train[1.5:]", "train[:2", "train[0:2:1]", "", "[:2]"])
def test_any_other_split_is_an_error(split):
    with pytest.raises(SourceError, match="expected"):
        rows(split=split)


def test_max_samples_cuts_after_the_slice():
    assert rows(split="train[2:]", max_samples=2) == [2, 3]


@pytest.mark.parametrize("options", [{"split": "train[6:]"}, {"split": "train[3:3]"}])
def test_selecting_nothing_is_an_error(options):
    with pytest.raises(SourceError, match="selects none of the 6 rows"):
        rows(**options)


@pytest.mark.parametrize("options", [{"max_samples": 0}, {"shuffle_seed": -1}])
def test_impossible_numbers_are_errors(options):
    with pytest.raises(SourceError, match="expected"):
        rows(**options)


@given(count=st.integers(2, 200), seed=st.integers(0, 2**40), data=st.data())
def test_slices_of_one_seed_cover_every_row_once(count, seed, data):
    cut = data.draw(st.integers(1, count - 1))
    head = rows(count, split=f"train[:{cut}]", shuffle_seed=seed)
    tail = rows(count, split=f"validation[{cut}:]", shuffle_seed=seed)
    assert len(head) == cut
    assert sorted(head + tail) == list(range(count))


def automodels(count=10, split=None, shuffle_seed=42, max_samples=None, *, is_json=False):
    return list(
        select_automodels_rows(count, is_json=is_json, split=split, shuffle_seed=shuffle_seed, max_samples=max_samples)
    )


@pytest.mark.parametrize("split", [None, "train", "train[:2]", "train[50%:]"])
def test_automodel_reads_all_rows_of_json_files_as_they_stand(split):
    assert automodels(split=split, is_json=True) == list(range(10))
    assert automodels(split=split, is_json=True, max_samples=3) == [0, 1, 2]


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        (None, [5, 6, 0, 7, 3, 2, 4, 9, 1, 8]),
        ("train", [5, 6, 0, 7, 3, 2, 4, 9, 1, 8]),
        ("train[2:5]", [0, 7, 3]),  # after the shuffle
        ("train[:99]", [5, 6, 0, 7, 3, 2, 4, 9, 1, 8]),
        ("train[-3:]", [9, 8, 7]),  # before it
        ("train-sft[2:5]", [4, 3, 2]),
        ("train[:25%]", [1, 0]),  # 2.5 rows are rounded to the even number
        ("train[3:60%]", [3, 2, 5, 4, 1, 0]),  # 3 %, which is no row
    ],
)
def test_automodels_slices_of_tables_come_after_the_shuffle_or_before_it(split, expected):
    assert automodels(split=split) == expected


@pytest.mark.parametrize("split", ["train[:2", "train[200%:]", "train[10:10]", "train[-10:-10]"])
@pytest.mark.parametrize("is_json", [True, False])
def test_what_is_no_split_of_ours_is_none_under_automodels_order(split, is_json):
    if is_json and split.endswith("10]"):
        assert len(automodels(split=split, is_json=True)) == 10
        return
    with pytest.raises(SourceError, match="split"):
        automodels(split=split, is_json=is_json)
