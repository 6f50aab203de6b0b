"""Going on with a store, refusing one that belongs to another job, and what is known before a target is loaded."""

import json
import re
import shutil

import pytest
import torch

import dspark_store as ds
from dspark_store.cli.main import main as command
from dspark_store.format.files import LocalObjectWriter
from dspark_store.format.ledger import state_ledger, token_ledger
from dspark_store.format.metadata import COPY_KEY, read_record
from dspark_store.format.schema import LAYERS
from dspark_store.format.storage import LocalStorage
from dspark_store.precompute import tokenise as tokenise_module
from dspark_store.precompute.__main__ import main
from dspark_store.precompute.capture import CaptureContext, ShardCapture
from dspark_store.target.batches import PaddedTokens
from dspark_store.writers.lock import LOCK_KEY, StoreLock
from tests.precompute.jobs import (
    arguments,
    contents,
    differing_samples,
    interrupted,
    precompute,
    refused,
    run_module,
    sharded_module,
    states_of_files,
    write_rows,
)
from tests.tiny import HIDDEN_SIZE, VOCAB_SIZE, save_target_dir, tiny_llama, tiny_tokenizer


def test_a_finished_store_is_refused_without_resume_and_left_alone_with_it(store, llama, chats, no_target, capsys):
    before = states_of_files(store)
    assert "already has shards" in refused(arguments(llama, chats, store), capsys)
    assert main(arguments(llama, chats, store, "--resume")) == 0
    assert "complete; nothing to do" in capsys.readouterr().out
    assert states_of_files(store) == before


def test_resuming_where_nothing_is_starts_a_store(store, llama, chats, tmp_path):
    assert contents(precompute(llama, chats, tmp_path / "store", "--resume")) == contents(store)


def test_an_unfinished_store_is_refused_without_resume_and_by_readers(unfinished, llama, chats, capsys):
    assert "already has shards of an unfinished store" in refused(arguments(llama, chats, unfinished), capsys)
    with pytest.raises(ValueError, match="incomplete"):
        ds.open_cache(unfinished)


def test_resume_fills_holes_wherever_they_are(unfinished, store, llama, chats):
    ledger = state_ledger(LocalStorage(unfinished), read_record(LocalStorage(unfinished)).schema)
    for shard in (0, 2):
        ledger.retract(shard)
    kept = states_of_files(unfinished / "ledger" / "states")
    del kept[str(unfinished / COPY_KEY)]
    precompute(llama, chats, unfinished, "--resume")
    assert kept.items() <= states_of_files(unfinished / "ledger" / "states").items()
    assert contents(unfinished) == contents(store)


@pytest.mark.parametrize("name", ["target_hidden_states/c.1.0.2", "target_last_hidden_states/c.1.0.0"])
@pytest.mark.parametrize("size", [None, 100])
def test_a_committed_shard_without_all_of_its_objects_is_named_and_done_again(
    unfinished, store, llama, chats, caplog, name, size
):
    (unfinished / name).unlink()
    if size is not None:
        (unfinished / name).write_bytes(bytes(size))
    kept = {path: state for path, state in states_of_files(unfinished).items() if "c.0.0" in path or "c.2.0" in path}
    precompute(llama, chats, unfinished, "--resume")
    assert f"shard 1 ({name} " in caplog.text
    assert kept.items() <= states_of_files(unfinished).items()
    assert contents(unfinished) == contents(store)


def test_committed_tokens_without_all_of_their_objects_are_done_again(store, llama, chats, tmp_path, caplog):
    output = interrupted(arguments(llama, chats, tmp_path / "store"), tokenise_module, "settle_tokens")
    (output / "loss_mask" / "c.1.0").unlink()
    precompute(llama, chats, output, "--resume")
    assert "shard 1 (loss_mask/c.1.0 is missing)" in caplog.text
    assert contents(output) == contents(store)


@pytest.mark.parametrize(
    ("name", "data"), [("ledger/states/c.0.0.0", b""), ("input_ids/c.1.0", bytes(50)), ("index/length/c.0", b"")]
)
def test_damage_that_a_resume_cannot_mend_says_what_to_do(unfinished, llama, chats, capsys, name, data):
    (unfinished / name).write_bytes(data)
    line = refused([*arguments(llama, chats, unfinished), "--resume"], capsys, code=1)
    assert line.endswith(f"; run dspark-store repair {unfinished}, then go on with --resume")


def losing_lock(monkeypatch, output, owner, name, when=lambda *args: True):
    """Let another job have the store's lock as soon as ``name`` has been called with such arguments."""
    call = getattr(owner, name)

    def call_and_lose(*args):
        result = call(*args)
        if when(*args):
            LocalStorage(output).put(LOCK_KEY, b"another job's")
        return result

    monkeypatch.setattr(owner, name, call_and_lose)


def is_of_states(writer):
    return writer.key.startswith(f"{LAYERS}/c.")


@pytest.mark.parametrize(
    ("owner", "name", "when", "objects"),
    [
        (ShardCapture, "finish", lambda *args: True, (4,)),
        (LocalObjectWriter, "finish", is_of_states, (0,)),
        (LocalObjectWriter, "commit", is_of_states, (1, 2, 3, 4)),
    ],
)
def test_a_job_that_loses_its_lock_while_it_finishes_a_shard_does_not_commit_it(
    store, llama, chats, tmp_path, monkeypatch, capsys, owner, name, when, objects
):
    output = tmp_path / "store"
    with monkeypatch.context() as patch:
        losing_lock(patch, output, owner, name, when)
        assert main(arguments(llama, chats, output)) == 3
    assert capsys.readouterr().err.endswith(f"stopped: {output} was taken over by another job; this one ends\n")
    assert list((output / "ledger" / "states").glob("c.*")) == []
    assert len(list(output.glob("target_*/c.*"))) in objects
    precompute(llama, chats, output, "--resume")
    assert contents(output) == contents(store)


def test_an_interrupt_behind_which_a_shard_is_committed_loses_no_commit(store, job, tmp_path, monkeypatch, capsys):
    forward, calls = CaptureContext.forward, []

    def interrupted_forward(context, *batch):
        calls.append(batch)
        if len(calls) == 4:  # of the second shard the last
            raise KeyboardInterrupt
        return forward(context, *batch)

    with monkeypatch.context() as patch:
        patch.setattr(CaptureContext, "forward", interrupted_forward)
        assert main(job()) == 130
    assert capsys.readouterr().err.rstrip().endswith("interrupted: what is committed stays; go on with --resume")
    output = tmp_path / "out" / "store"
    assert ds.existing_shard_indices(output) == {0}
    assert list(LocalStorage(output).temporaries()) == []
    assert main(job("--resume")) == 0
    assert contents(output) == contents(store)


def test_a_job_that_loses_its_lock_while_it_tokenises_goes_on_for_no_shard(llama, chats, tmp_path, monkeypatch, capsys):
    losing_lock(monkeypatch, tmp_path / "store", tokenise_module, "write_token_shard")
    assert main(arguments(llama, chats, tmp_path / "store")) == 3
    assert "was taken over by another job" in capsys.readouterr().err
    assert token_ledger(LocalStorage(tmp_path / "store")).committed() == [0]


def test_resume_finishes_a_token_phase_first(store, llama, chats, tmp_path):
    output = interrupted(arguments(llama, chats, tmp_path / "store"), tokenise_module, "settle_tokens")
    for shard in (0, 1):
        (output / "ledger" / "tokens" / f"c.{shard}.0.0").unlink()
    precompute(llama, chats, output, "--resume")
    assert contents(output) == contents(store)


def test_the_same_data_under_another_path_is_resumed(unfinished, store, llama, chats, tmp_path):
    moved = tmp_path / "moved.jsonl"
    moved.write_bytes(chats.read_bytes())
    precompute(llama, moved, unfinished, "--resume")
    cache = ds.open_cache(unfinished)
    assert all(torch.equal(cache[row]["input_ids"], ds.open_cache(store)[row]["input_ids"]) for row in range(11))


def test_other_data_under_the_same_path_is_refused(llama, chats, tmp_path, capsys):
    data = tmp_path / "chats.jsonl"
    data.write_bytes(chats.read_bytes())
    job = arguments(llama, data, tmp_path / "store")
    interrupted(job)
    data.write_bytes(chats.read_bytes().replace(b"draft", b"craft"))
    before = states_of_files(tmp_path / "store")
    line = refused([*job, "--resume"], capsys)
    assert "does not match this run in source.content_sha256: " in line
    assert states_of_files(tmp_path / "store") == before


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        (("--seq-length", 64), "seq_length"),
        (("--shuffle-seed", "none"), "shuffle_seed"),
        (("--max-samples", 5), "source.max_samples"),
        (("--mask-headers",), "source.mask_headers"),
        (("--batch-size", 4), "batch_size"),
        (("--dtype", "bf16"), "dtype"),
        (("--target-layer-ids", 1, 2), "target_layer_ids"),
        (("--compute-dtype", "bf16"), "compute_dtype"),
        (("--codec", "none"), "codec"),
    ],
)
@pytest.mark.usefixtures("no_target")
def test_another_job_is_refused_by_the_field_that_differs(store, llama, chats, capsys, flags, field):
    before = states_of_files(store)
    line = refused(arguments(llama, chats, store, "--resume", *flags), capsys)
    assert f" does not match this run in {field}: store " in line
    assert line.count("this run") == 2  # what follows from the field is not told
    assert states_of_files(store) == before


def test_batches_by_tokens_are_another_identity_and_are_gone_on_with(llama, chats, tmp_path, capsys):
    job = [*arguments(llama, chats, tmp_path / "store"), "--batch-tokens", "100"]
    del job[job.index("--batch-size") : job.index("--batch-size") + 2]
    output = interrupted(job)
    record = read_record(LocalStorage(output))
    assert (record.manifest.get("batch_size"), record.manifest["batch_tokens"]) == (None, 100)
    line = refused(arguments(llama, chats, output, "--resume"), capsys)
    assert "does not match this run in batch_size: store None, this run 2; batch_tokens: store 100, this run N" in line
    state_ledger(LocalStorage(output), record.schema).retract(1)
    assert main([*job, "--resume"]) == 0
    cache = ds.open_cache(output)
    assert differing_samples(tiny_llama(), cache, cache.pad_token_id, PaddedTokens(100)) == []
    assert command(["verify", str(output), "--recompute", "11", "--target-model", str(llama), "--device", "cpu"]) == 0
    assert command(["info", str(output)]) == 0
    assert "batch tokens 100" in capsys.readouterr().out
    assert main([*job, "--resume", "--estimate"]) == 0


@pytest.mark.usefixtures("no_target")
def test_another_target_of_the_same_shape_is_refused(store, chats, tmp_path, capsys):
    other = save_target_dir(tmp_path / "other", tiny_llama(seed=1))
    line = refused(arguments(other, chats, store, "--resume"), capsys)
    assert "does not match this run in target_weights: " in line


@pytest.mark.usefixtures("no_target")
def test_another_target_is_told_by_its_weights_and_a_source_of_another_type_by_that(store, chats, tmp_path, capsys):
    other = save_target_dir(tmp_path / "other", tiny_llama(vocab_size=VOCAB_SIZE + 8))
    line = refused(arguments(other, "{type: dummy, samples: 11, max_length: 9}", store, "--resume"), capsys)
    assert re.findall(r"(?:in|;) (\S+): store", line) == ["source.type", "target_weights"]


def test_shards_without_a_manifest_are_refused(unfinished, llama, chats, capsys):
    (unfinished / "zarr.json").unlink()
    before = states_of_files(unfinished)
    for flags in ((), ("--resume",)):
        line = refused(arguments(llama, chats, unfinished, *flags), capsys)
        assert "manifest is missing" in line
        assert f"run dspark-store repair {unfinished}, or choose another --output-dir" in line
    assert states_of_files(unfinished) == before


@pytest.mark.usefixtures("no_target")
def test_a_store_that_another_job_is_writing_is_refused(llama, chats, tmp_path, capsys):
    with StoreLock(LocalStorage(tmp_path / "store")):
        before = states_of_files(tmp_path)
        assert "is being written by process" in refused(arguments(llama, chats, tmp_path / "store"), capsys)
        assert states_of_files(tmp_path) == before


@pytest.mark.usefixtures("no_target")
def test_an_estimate_gives_exact_bytes_and_writes_nothing(store, llama, chats, tmp_path, capsys):
    assert main(arguments(llama, chats, tmp_path / "none", "--estimate", "--tokens-per-second", 100)) == 0
    printed = capsys.readouterr().out
    tokens = int(ds.open_cache(store).lengths.sum())
    assert f"{tokens * 3 * HIDDEN_SIZE * 4:,} bytes" in printed
    assert "at 100 tokens/s" in printed
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("no_target")
def test_an_estimate_of_a_store_reads_its_index_and_knows_its_rate(store, llama, chats, capsys):
    before = states_of_files(store)
    assert main(arguments(llama, chats, store, "--estimate")) == 0
    printed = capsys.readouterr().out
    rate = read_record(LocalStorage(store)).producers[-1]["tokens_per_second"]
    assert f"at {rate:,.0f} tokens/s" in printed
    assert f"tokens             {int(ds.open_cache(store).lengths.sum()):,} " in printed
    assert states_of_files(store) == before


@pytest.mark.usefixtures("no_target")
def test_a_disk_that_is_too_small_is_refused_before_the_target_is_loaded(llama, chats, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(LocalStorage, "free_bytes", lambda self: 1000)
    assert "no space: up to " in refused(arguments(llama, chats, tmp_path / "store"), capsys)


def test_a_smoke_test_runs_a_few_samples_and_then_the_job_with_one_load(
    store, llama, chats, tmp_path, monkeypatch, capsys
):
    load, loads = sharded_module.load_target, []

    def counted(*args, **options):
        loads.append(args)
        return load(*args, **options)

    monkeypatch.setattr(sharded_module, "load_target", counted)
    output = precompute(llama, chats, tmp_path / "store", "--smoke", 3)
    assert "smoke test passed: 3 samples" in capsys.readouterr().out
    assert len(loads) == 1
    assert list(tmp_path.iterdir()) == [output]
    assert contents(output) == contents(store)


def test_a_failed_smoke_test_leaves_nothing(llama, chats, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        run_module, "verify_store", lambda cache: [ds.Problem(ds.Part.STATES, "layers/c.0", 0, (0,), "is wrong")]
    )
    line = refused(arguments(llama, chats, tmp_path / "new" / "store", "--smoke", 2), capsys)
    assert line == "error: the smoke test failed: layers/c.0: is wrong (1 problems)"
    assert list(tmp_path.iterdir()) == []


def test_a_resume_with_nothing_missing_loads_no_target(job, unfinished, store, no_target):
    assert main(job("--resume", output=unfinished)) == 0
    assert contents(unfinished) == contents(store)


def test_a_target_that_computes_something_else_with_the_same_weights_is_refused(
    job, unfinished, llama, tmp_path, capsys
):
    other = tmp_path / "other"
    shutil.copytree(llama, other)
    settings = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**settings, "rms_norm_eps": 0.5}))
    line = refused(job("--resume", target=other, output=unfinished), capsys)
    assert "does not match this run in target_config.rms_norm_eps: store 1e-06, this run 0.5" in line


def test_texts_need_no_chat_template_and_are_resumed_by_the_same_column_only(tmp_path, capsys):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    target = save_target_dir(tmp_path / "base", tokenizer=tokenizer)
    texts = write_rows(tmp_path / "texts.jsonl", [{"text": "one two", "title": "one"}, {"text": "two", "title": "two"}])
    assert "no chat template" in refused(arguments(target, texts, tmp_path / "chats"), capsys)
    store = precompute(target, texts, tmp_path / "store", "--text-column", "text", "--shuffle-seed", "none")
    cache = ds.open_cache(store)
    assert cache[0]["input_ids"][: cache.lengths[0]].tolist() == tokenizer("one two")["input_ids"]
    assert cache.supervised.tolist() == cache.lengths.tolist()
    flags = ("--resume", "--shuffle-seed", "none", "--text-column")
    assert main(arguments(target, texts, store, *flags, "text")) == 0
    assert "does not match this run in source.text_column: store 'text', this run 'title'" in refused(
        arguments(target, texts, store, *flags, "title"), capsys
    )
