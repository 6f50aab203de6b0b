import itertools
from pathlib import Path

import numpy as np
import pytest

from dspark_store.sources.megatron import MegatronOptions, MegatronSource, PairBuilder, write_samples
from dspark_store.sources.megatron.source import build_megatron
from dspark_store.sources.registry import SourceContext, SourceSpec, build_source
from dspark_store.sources.source import Sample, SourceError
from tests.sources.megatron.golden import GOLDEN
from tests.sources.megatron.pairs import numbered, write_pair

WINDOWS = {"mode": "window", "cache": False}
RULES = ("megatron", "hyper_parallel")


def source(prefix: Path, seq_length: int = 8, *, context=None, **options) -> MegatronSource:
    return MegatronSource(prefix, MegatronOptions(**options), seq_length=seq_length, **(context or {}))


def ids(samples) -> list[list[int]]:
    return [sample.input_ids.tolist() for sample in samples]


@pytest.mark.parametrize("name", ["uint16", "int32", "multimodal"])
def test_golden_documents_are_samples_without_the_empty_ones(name, tmp_path):
    golden = GOLDEN[name]
    opened = source(golden.build(tmp_path / "a"), 64, skip_images=True)
    samples = list(opened.read())
    assert ids(samples) == [document for document in golden.documents() if document]
    assert opened.lengths().tolist() == [len(document) for document in golden.documents()]
    assert len(opened) == len(golden.documents())
    assert opened.origins() == ("",)
    assert all(sample.input_ids.dtype == np.int32 and sample.loss_mask.dtype == np.uint8 for sample in samples)
    assert all(sample.loss_mask.all() and len(sample.loss_mask) == len(sample.input_ids) for sample in samples)


@pytest.mark.parametrize("options", [{"over_long": "split"}, {**WINDOWS, "window": 4, "num_samples": 6}])
def test_reading_goes_on_from_every_cursor(options, tmp_path):
    opened = source(write_pair(tmp_path / "a", numbered([0, 5, 9, 0, 8, 4, 0])), 5, **options)
    samples = list(opened.read())
    cursors = [sample.cursor for sample in samples]
    assert all(before < after for before, after in itertools.pairwise(cursors))
    for sample, after in zip(samples, range(1, len(samples) + 1), strict=True):
        assert ids(opened.read(sample.cursor)) == ids(samples[after:])
    assert opened.record_of(0) == int("over_long" in options)  # the empty document; no window
    assert opened.record_of(cursors[-1]) == len(opened)
    with pytest.raises(ValueError, match="cursor is 99"):
        opened.read(99)


@pytest.mark.parametrize(
    ("over_long", "expected"),
    [
        ("truncate", {"read": 6, "kept": 3, "samples": 3, "tokens": 10, "truncated": 1, "empty": 3}),
        ("drop", {"read": 6, "kept": 2, "samples": 2, "tokens": 6, "dropped": 1, "empty": 3}),
        ("split", {"read": 6, "kept": 3, "samples": 5, "tokens": 15, "split": 1, "empty": 3}),
    ],
)
def test_a_report_tells_what_became_of_the_documents(over_long, expected, tmp_path):
    opened = source(write_pair(tmp_path / "a", numbered([0, 2, 9, 0, 4, 0])), 4, over_long=over_long)
    list(opened.read())
    report = opened.report()
    counted = {name: getattr(report, name) for name in (*expected, "refused", "unsupervised")}
    assert counted == {**expected, "refused": 0, "unsupervised": 0}
    assert report.supervised == report.tokens


def test_a_report_counts_what_has_too_few_supervised_tokens(tmp_path):
    prefix = write_pair(tmp_path / "a", numbered([1, 2]))
    opened = source(prefix, 4, context={"min_supervised": 2})
    list(opened.read())
    report = opened.report()
    assert (report.read, report.kept, report.samples, report.too_few_supervised) == (2, 1, 1, 1)


def test_one_record_is_read_by_its_number(tmp_path):
    opened = source(write_pair(tmp_path / "a", numbered([5, 0, 9])), 4, over_long="split")
    assert ids([opened.sample(0), opened.sample(2)]) == [[0, 1, 2, 3], [200, 201, 202, 203]]
    assert ids(opened.read(opened.sample(0).cursor))[0] == [4]
    with pytest.raises(SourceError, match="a, document 1 gives no sample: it is empty"):
        opened.sample(1)
    with pytest.raises(IndexError, match="expected 0 to 2"):
        opened.sample(3)


def test_documents_are_shuffled_and_split_as_every_source(tmp_path):
    prefix = write_pair(tmp_path / "a", [[number] for number in range(20)])
    order = np.random.Generator(np.random.PCG64(7)).permutation(20).tolist()
    context = {"shuffle_seed": 7, "split": "train[5:15]", "max_samples": 4}
    assert ids(source(prefix, context=context).read()) == [[number] for number in order[5:9]]


def test_an_id_outside_the_vocabulary_is_refused_with_its_place(tmp_path):
    prefix = write_pair(tmp_path / "a", [[1, 2], [3, 100, 4]], lengths=[[2], [1, 2]])
    assert ids(source(prefix, context={"vocab_size": 101}).read()) == [[1, 2], [3, 100, 4]]
    message = r"a\.bin: token 0 of document 1 \(sequence 2\) is the id 100; expected 0 to 99: .* another tokenizer"
    opened = source(prefix, context={"vocab_size": 100})
    assert opened.lengths().tolist() == [2, 3]  # without a look at the tokens
    with pytest.raises(SourceError, match=message):
        list(opened.read())


@pytest.mark.parametrize(("bad", "dtype"), [(-1, "int32"), (2**31, "int64")])
def test_an_id_that_is_none_is_refused_without_a_vocabulary_too(bad, dtype, tmp_path):
    with pytest.raises(SourceError, match=f"is the id {bad}; expected 0 to 2147483647"):
        list(source(write_pair(tmp_path / "a", [[bad]], dtype)).read())


def test_the_loss_mask_comes_from_a_second_pair(tmp_path):
    documents = [[1, 2, 3], [], [4, 5, 6, 7, 8]]
    masks = [[0, 1, 1], [], [0, 0, 1, 0, 1]]
    prefix = write_pair(tmp_path / "a", documents)
    write_pair(tmp_path / "m", masks, "uint8")
    samples = list(source(prefix, 4, loss_mask=tmp_path / "m").read())
    assert [sample.loss_mask.tolist() for sample in samples] == [[0, 1, 1], [0, 0, 1, 0]]
    kept = source(prefix, 4, loss_mask=tmp_path / "m", context={"min_supervised": 2})
    assert ids(kept.read()) == [[1, 2, 3]]
    with pytest.raises(SourceError, match="document 2 gives no sample: 1 of its tokens"):
        kept.sample(2)

    flat = source(prefix, 8, loss_mask=tmp_path / "m", **WINDOWS)
    (window,) = flat.read()
    supervised = dict(zip(itertools.chain(*documents), itertools.chain(*masks), strict=True))
    assert [supervised[token] for token in window.input_ids.tolist()] == window.loss_mask.tolist()


def test_a_loss_mask_of_other_lengths_or_values_is_refused(tmp_path):
    prefix = write_pair(tmp_path / "a", [[1, 2, 3], [4]])
    with pytest.raises(SourceError, match="is not the loss mask of"):
        source(prefix, loss_mask=write_pair(tmp_path / "m", [[1, 1], [1, 1]], "uint8"))
    odd = write_pair(tmp_path / "odd", [[1, 0, 2], [1]], "uint8")
    with pytest.raises(SourceError, match=r"odd\.bin: token 2 of document 0 \(sequence 0\) is 2; a loss mask holds"):
        list(source(prefix, loss_mask=odd).read())


def test_floats_and_empty_corpora_are_refused(tmp_path):
    write_pair(tmp_path / "a", [[1, 2]])
    raw = bytearray((tmp_path / "a.idx").read_bytes())
    raw[17] = 7  # float32 is as wide as int32
    (tmp_path / "a.idx").write_bytes(raw)
    with pytest.raises(SourceError, match="values of the dtype float32; expected token ids"):
        source(tmp_path / "a")
    with pytest.raises(SourceError, match="holds no tokens"):
        source(write_pair(tmp_path / "b", [[], []]))


def test_windows_are_those_of_megatron_with_the_token_after_them(tmp_path):
    prefix = write_pair(tmp_path / "a", numbered([5, 3, 8, 4]), lengths=[[5], [3], [8], [4]])
    carried = source(prefix, 5, seed=42, num_samples=4, **WINDOWS)
    assert ids(carried.read()) == [
        [301, 302, 303, 0, 1],
        [200, 201, 202, 203, 204],
        [100, 101, 102, 300, 301],
        [1, 2, 3, 4, 200],
    ]
    bare = source(prefix, 4, seed=42, num_samples=4, carry_next_token=False, **WINDOWS)
    assert ids(bare.read()) == [[301, 302, 303, 0], [200, 201, 202, 203], [100, 101, 102, 300], [1, 2, 3, 4]]
    assert len(source(prefix, 5, seed=42, num_samples=6, **WINDOWS)) == 9
    assert len(source(prefix, 5, seed=42, num_samples=6, rule="hyper_parallel", **WINDOWS)) == 6


def test_the_partial_window_is_shorter_and_not_padded(tmp_path):
    prefix = write_pair(tmp_path / "a", numbered([5, 3, 8, 4]))
    opened = source(prefix, 7, window=6, seed=42, keep_partial=True, **WINDOWS)
    samples = ids(opened.read())
    assert opened.lengths().tolist() == [len(sample) for sample in samples]
    assert [sample for sample in samples if len(sample) < 7] == [[206, 207]]


def test_windows_are_cut_from_sequences_by_megatron_and_from_documents_by_hyper_parallel(tmp_path):
    with PairBuilder(tmp_path / "a") as builder:
        builder.add_document([0, 1, 10, 11, 12], [2, 3])
        builder.add_document([20, 21, 22, 23])
        builder.add_document([], [])
    by_rule = {rule: ids(source(tmp_path / "a", 5, seed=3, rule=rule, **WINDOWS).read()) for rule in RULES}
    assert by_rule == {
        "megatron": [[10, 11, 12, 0, 1], [1, 20, 21, 22, 23]],
        "hyper_parallel": [[20, 21, 22, 23, 0], [0, 1, 10, 11, 12]],
    }


def test_the_token_after_the_end_of_a_document_can_be_left_unsupervised(tmp_path):
    end = 999
    documents = [[1, 2, end], [3, 4, 5, end], [6, end], [7, 8, 9, 10, end]]
    opened = source(write_pair(tmp_path / "a", documents), 14, seed=42, eod_token_id=end, **WINDOWS)
    (sample,) = opened.read()
    assert sample.input_ids.tolist() == [3, 4, 5, end, 7, 8, 9, 10, end, 1, 2, end, 6, end]
    # Megatron-LM's mask is 0 at the inputs 3, 8 and 11: what follows them is at 4, 9 and 12.
    assert np.flatnonzero(sample.loss_mask == 0).tolist() == [4, 9, 12]


def test_a_part_and_a_slice_of_the_windows_can_be_read(tmp_path):
    prefix = write_pair(tmp_path / "a", numbered([4] * 10))
    valid = source(prefix, 5, parts="8,2", part="valid", **WINDOWS)
    assert {token // 100 for sample in valid.read() for token in sample.input_ids.tolist()} == {8, 9}
    whole = source(prefix, 5, **WINDOWS)
    some = source(prefix, 5, context={"split": "train[2:6]", "max_samples": 3}, **WINDOWS)
    assert ids(some.read()) == ids(whole.read())[2:5]
    assert len(some) == len(some.lengths()) == 3


def test_a_window_must_fit_and_there_must_be_one(tmp_path):
    prefix = write_pair(tmp_path / "a", numbered([5]))
    with pytest.raises(SourceError, match=r"window of 4 tokens and the token after it needs a sequence length of 5"):
        source(prefix, 4, window=4, **WINDOWS)
    with pytest.raises(SourceError, match=r"5 tokens are less than a window of 7"):
        source(prefix, 8, **WINDOWS)
    assert len(source(prefix, 8, num_samples=1, **WINDOWS)) == 1


def test_the_indices_are_kept_beside_the_pair(tmp_path):
    prefix = write_pair(tmp_path / "a", numbered([5, 9]))
    first = ids(source(prefix, 5, mode="window").read())
    assert len(list((tmp_path / "a.windows").iterdir())) == 1
    assert ids(source(prefix, 5, mode="window").read()) == first


def test_the_identity_is_the_content_and_the_options_and_not_the_path(tmp_path):
    one = write_pair(tmp_path / "a", [[1, 2, 3]])
    moved = write_pair(tmp_path / "sub" / "b", [[1, 2, 3]])
    edited = write_pair(tmp_path / "c", [[1, 2, 4]])
    cut = write_pair(tmp_path / "d", [[1, 2], [3]])
    mask = write_pair(tmp_path / "m", [[1, 0, 1]], "uint8")
    assert source(one).identity() == source(moved).identity()
    identities = [source(one).identity(), source(edited).identity(), source(cut).identity()]
    identities += [source(one, loss_mask=mask).identity(), source(one, over_long="split").identity()]
    identities += [source(one, context=change).identity() for change in ({"shuffle_seed": 1}, {"split": "a[0:1]"})]
    identities += [source(one, 3, seed=seed, **WINDOWS).identity() for seed in (1, 2)]
    assert all(one != other for one, other in itertools.combinations(identities, 2))


def test_a_corpus_that_changes_is_not_read_on(tmp_path):
    prefix = write_pair(tmp_path / "a", [[1, 2, 3], [4]])
    opened = source(prefix)
    (tmp_path / "a.bin").write_bytes(bytes(16))
    for call in (opened.read, opened.identity, lambda: opened.sample(0)):
        with pytest.raises(SourceError, match="was changed while it was in use; start again"):
            call()


def test_samples_written_as_pairs_read_back(tmp_path):
    samples = [
        Sample(np.array([5, 70000, 7], np.int32), np.array([0, 1, 1], np.uint8), 1),
        Sample(np.array([8], np.int32), np.array([0], np.uint8), 2),
    ]
    write_samples(samples, tmp_path / "a", mask_prefix=tmp_path / "m", vocab_size=70001)
    back = list(source(tmp_path / "a", loss_mask=tmp_path / "m").read())
    assert ids(back) == ids(samples)
    assert [sample.loss_mask.tolist() for sample in back] == [[0, 1, 1], [0]]
    write_samples(samples, tmp_path / "b")
    assert ids(source(tmp_path / "b").read()) == ids(samples)


def test_a_specification_is_built_with_the_settings_of_the_job(tmp_path):
    prefix = write_pair(tmp_path / "a", numbered([5, 9, 2]))
    context = SourceContext(seq_length=4, vocab_size=1000, shuffle_seed=3, over_long="split", min_supervised=2)
    assert ids(build_megatron(context, path=str(prefix), shuffle_seed=None).read()) == [
        [0, 1, 2, 3],
        [100, 101, 102, 103],
        [104, 105, 106, 107],
        [200, 201],
    ]
    windows = build_megatron(context, path=str(prefix), mode="window", cache=False)
    assert windows.identity()["seed"] == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"moed": "window"}, "no option 'moed'; the nearest is 'mode'"),
        ({"mode": "windows"}, "mode is 'windows'; expected one of document, window"),
        ({"mode": ["window"]}, r"mode is \['window'\]; expected one of document, window"),
        ({"over_long": "wrap"}, "over_long is 'wrap'; expected one of truncate, drop, split"),
        ({"window": 4}, "window is 4: an option of the mode 'window', but it is 'document'"),
        ({"mode": "window", "over_long": "drop"}, "over_long is 'drop': an option of the mode 'document'"),
        ({"mode": "window", "seed": "4"}, "'seed' .* is '4'; expected a whole number or none"),
        ({"skip_images": "yes"}, "'skip_images' .* is 'yes'; expected true or false"),
        ({"vocab_size": True}, "'vocab_size' .* is True; expected a whole number"),
    ],
)
def test_options_that_cannot_be_are_refused(options, message, tmp_path):
    prefix = write_pair(tmp_path / "a", [[1]])
    with pytest.raises(SourceError, match=message):
        build_source(SourceSpec("megatron", {"path": str(prefix), **options}), SourceContext(seq_length=4))


def test_the_report_counts_empty_documents_at_the_beginning_too(tmp_path):
    opened = source(write_pair(tmp_path / "a", [[], [], [1], []]))
    assert len(list(opened.read())) == 1
    assert (opened.report().read, opened.report().empty) == (4, 3)
