"""Whatever the root of a store says, every command ends by itself: with 0, 1 or 2, in one line, and in little memory.

The roots are sealed as anybody can seal them. `info`, `head` and all the others must tell what is wrong, and never be
surprised (exit code 3), size an array or walk a range by a number that only JSON bears out.
"""

import hashlib
import json
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspark_store.cli.main import main
from dspark_store.format.arrays import pack_array
from dspark_store.format.manifest import ATTRIBUTE, parse_record, seal_digest
from dspark_store.format.metadata import COPY_KEY, ROOT_KEY, node_key, record_nodes
from dspark_store.format.schema import (
    EMBED,
    HEAD,
    HEAD_BIAS,
    INDEX_LENGTH,
    group_document,
    metadata_bytes,
)
from tests.stores import RAGGED, build_store

MANIFEST = {"pad_token_id": 5, "num_hidden_layers": 6, "target_vocab_size": 19, "target_model_type": "tiny"}
MOST_KIBIBYTES = 256 * 1024

type Attributes = dict[str, Any]
type Edit = Callable[[Attributes], object]


def build(directory: Path, until: str = "complete") -> Path:
    """Write a small store of two shards in some phase."""
    without = (1,) if until == "states" else ()
    store = build_store(directory, until=until, without_shards=without, fields={"manifest": MANIFEST})  # type: ignore[arg-type]
    return store.path


def seal(store: Path, edit: Edit, *, copy: bool = True) -> bool:
    """Edit the attributes of a root and seal it anew, with the nodes that its layout gives; return if it gives any."""
    attributes = json.loads((store / ROOT_KEY).read_text())["attributes"][ATTRIBUTE]
    edit(attributes)
    try:
        nodes = record_nodes(parse_record(attributes, "hostile"))
    except ValueError:
        nodes = {}
    for path, document in nodes.items():
        place = store / node_key(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(metadata_bytes(document))
    attributes["seal"] = seal_digest(attributes, nodes)
    text = metadata_bytes(group_document({ATTRIBUTE: attributes}))
    for key in (ROOT_KEY, COPY_KEY) if copy else (ROOT_KEY,):
        (store / key).write_bytes(text)
    return bool(nodes)


def setting(path: str, value: object) -> Edit:
    """Return an edit that sets one field, addressed by dots."""
    *parents, name = path.split(".")

    def edit(attributes: Attributes) -> None:
        place = attributes
        for parent in parents:
            place = place[parent]
        place[name] = value

    return edit


def layout(**fields: object) -> Edit:
    return lambda attributes: attributes["layout"].update(fields)


def everything(*edits: Edit) -> Edit:
    return lambda attributes: [edit(attributes) for edit in edits]


PHASES = ("complete", "states", "tokens")
VALUES: tuple[object, ...] = (
    None,
    True,
    -1,
    1.5,
    2**31,
    2**62,
    2**70,
    1e300,
    "x",
    "\x1b[2J\u202e",
    [],
    [[]],
    {},
    {"a": 1},
)
FIELDS = (
    *("store_id", "phase", "complete", "declared_complete", "manifest", "layout", "target_config", "head", "semantics"),
    *("producers", "weights", "checksums", "copied_from", "root_copy", "format_version"),
    *("layout.num_samples", "layout.shard_size", "layout.seq_length", "layout.hidden_size", "layout.num_layers"),
    *("layout.layer_ids", "layout.dtype", "layout.codec", "layout.chunk_tokens", "layout.sources"),
    *("manifest.pad_token_id", "manifest.num_hidden_layers", "manifest.target_vocab_size", "manifest.target_model"),
    *("manifest.source", "manifest.tokenizer_sha256", "manifest.target_num_hidden_layers_full", "head.tied"),
    *("head.logit_scale", "checksums.index/length", f"weights.{EMBED}"),
)
GIANTS: dict[str, Edit] = {
    "many samples": layout(num_samples=2**31),
    "more samples": layout(num_samples=2**62, seq_length=1, hidden_size=1, num_layers=0, layer_ids=[]),
    "a sample a shard": layout(num_samples=2**40, shard_size=1),
    "a shard of all": layout(num_samples=2**22, shard_size=2**21, chunk_tokens=20),
    "many positions": layout(seq_length=2**26),
    "positions in one chunk": layout(seq_length=2**26, chunk_tokens=2**26, shard_size=1),
    "many features": layout(hidden_size=2**30, chunk_tokens=1, shard_size=1),
    "many layers": layout(num_layers=1024, layer_ids=list(range(1024))),
    "many layers and shards": everything(
        layout(num_layers=1024, layer_ids=list(range(1024))), layout(num_samples=20, shard_size=1)
    ),
    "a large vocabulary": everything(setting(f"weights.{EMBED}", [2**31 - 1, 8]), setting(f"weights.{HEAD}", [1, 8])),
    "a large bias": setting(f"weights.{HEAD_BIAS}", [2**31 - 1]),
    "a vocabulary of the manifest": setting("manifest.target_vocab_size", 2**31 - 1),
    "a deep target": setting("manifest.num_hidden_layers", 2**62),
}
TEXTS = {
    "NaN": b"NaN",
    "infinite": b"1e999",
    "deep": b"[" * 100_000,
    "deep enough": b"[" * 400 + b"]" * 400,
    "surrogate": b'"\\ud800"',
    "digits": b"9" * 10_000,
    "no UTF-8": b'"\xff"',
    "twice": b'{"a": 1, "a": 2}',
}
PLACES = ("store_id", "manifest", "layout", "target_config")
WRONG = [(name, field) for at, name in enumerate(TEXTS) for field in ("whole", PLACES[at % len(PLACES)])]


def commands(store: Path, tmp_path: Path) -> list[list[str]]:
    """Return every command that looks at a store, those that write last."""
    return [
        ["info", str(store)],
        ["info", "--json", str(store)],
        ["head", str(store), "-n", "2"],
        ["verify", str(store)],
        ["verify", "--quick", "--json", str(store)],
        ["stats", str(store), "--output", str(tmp_path / "stats")],
        ["diff", str(store), str(store)],
        ["rechunk", str(store), str(tmp_path / "copy"), "--codec", "fast"],
        ["estimate", "--store", str(store), "--codec", "none"],
        ["repair", "--dry-run", str(store)],
        ["repair", str(store)],
        ["info", str(store)],
    ]


def assert_told(words: list[str], capsys: pytest.CaptureFixture[str]) -> int:
    """Run a command; what it says on stderr, besides bars, is one line, and it is not surprised."""
    code = main(words)
    told = [line for line in capsys.readouterr().err.splitlines() if line and "\r" not in line and "|" not in line]
    assert code in (0, 1, 2), (words, told)
    assert len([line for line in told if line.startswith(("error:", "cannot be repaired:"))]) <= 1, (words, told)
    return code


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A store in each phase, which nobody changes."""
    return {until: build(tmp_path_factory.mktemp(until) / "store", until) for until in PHASES}


@pytest.mark.parametrize("field", FIELDS)
def test_any_value_of_a_field_is_told_in_one_line(field, built, tmp_path, capsys):
    refused = (1, 2) if field == "format_version" else (1,)
    for number, value in enumerate(VALUES, FIELDS.index(field)):  # each value, and each field, in every phase
        place = tmp_path / f"{number}"
        store = shutil.copytree(built[PHASES[number % len(PHASES)]], place / "store")
        believed = seal(store, setting(field, value))
        for words in commands(store, place) if believed else [["info", str(store)], ["repair", str(store)]]:
            code = assert_told(words, capsys)
            assert believed or code in refused, (words, value)


@pytest.mark.parametrize("until", PHASES)
def test_a_manifest_of_nulls_is_told_in_one_line(until, tmp_path, capsys):
    store = build(tmp_path / "store", until)
    assert seal(store, lambda attributes: attributes.update(manifest=dict.fromkeys(attributes["manifest"])))
    for words in commands(store, tmp_path):
        assert_told(words, capsys)


CASES = [(name, until) for at, name in enumerate(GIANTS) for until in ("complete", PHASES[1 + at % 2])]


@pytest.mark.parametrize(("name", "until"), CASES)
def test_a_number_that_no_object_bears_out_takes_no_memory(name, until, tmp_path, capsys):
    store = build(tmp_path / "store", until)
    seal(store, GIANTS[name])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for words in commands(store, tmp_path):
        assert_told(words, capsys)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + MOST_KIBIBYTES, words


@pytest.mark.parametrize("until", ["complete", "states"])
@pytest.mark.parametrize("rows", [3, 2**20])
def test_an_index_of_holes_bears_no_number_out(rows, until, tmp_path, capsys):
    store, samples = build(tmp_path / "store", until), 2**23
    seal(store, layout(num_samples=samples, shard_size=rows))
    shards = -(-samples // rows)
    sizes = {"length/c.0": 4, "supervised/c.0": 4, "digest/c.0.0": 16, "status/c.0": 1}
    sizes = {key: samples * size for key, size in sizes.items()} | {"objects/c.0.0.0": shards * 16 * 7}
    for key, size in sizes.items():
        if (store / "index" / key).exists():
            os.truncate(store / "index" / key, 0)
            os.truncate(store / "index" / key, size + 4)
    for path in ("input_ids/c.0.0", "input_ids/c.1.0"):
        os.truncate(store / path, 0)
        os.truncate(store / path, rows * 16 + 4)
    for words in commands(store, tmp_path):
        assert assert_told(words, capsys) in (1, 2), words


def test_a_ledger_row_alone_bears_no_rows_of_a_shard_out(tmp_path, capsys):
    store, rows = build(tmp_path / "store", "tokens"), 2**20
    assert seal(store, layout(shard_size=rows))
    for shard in range(12):
        row = np.array([[1, 1], [1, 1], [7, rows]], np.uint64)
        (store / "ledger" / "tokens" / f"c.{shard}.0.0").write_bytes(pack_array(row))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert assert_told(["verify", str(store)], capsys) == 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + MOST_KIBIBYTES


@pytest.mark.parametrize("length", [2**31 - 1, -(2**31), 21])
def test_no_command_walks_a_sample_past_the_length_of_a_row(length, tmp_path, capsys):
    store = build(tmp_path / "store")
    values = np.array([length, *RAGGED[1:]], "<i4")
    (store / INDEX_LENGTH / "c.0").write_bytes(stored := pack_array(values))
    checksum = hashlib.blake2b(stored, digest_size=16).hexdigest()
    seal(store, lambda attributes: attributes["checksums"].update({INDEX_LENGTH: checksum}))
    for words in commands(store, tmp_path):
        code = assert_told(words, capsys)
        assert code == 1 or words[0] in ("info", "repair"), words


@pytest.mark.parametrize(("name", "field"), WRONG)
def test_text_that_no_writer_writes_is_a_damaged_store_and_the_copy_restores_it(name, field, tmp_path, capsys):
    store = build(tmp_path / "store")
    before = (store / ROOT_KEY).read_bytes()
    if field == "whole":
        text = TEXTS[name]
    else:
        document = json.loads(before)
        document["attributes"][ATTRIBUTE][field] = "@"
        text = json.dumps(document).encode().replace(b'"@"', TEXTS[name])
    (store / ROOT_KEY).write_bytes(text)
    for words in (["info"], ["head"], ["verify"], ["repair", "--dry-run"]):
        assert assert_told([*words, str(store)], capsys) == (0 if words[0] == "repair" else 1), words
    assert assert_told(["repair", str(store)], capsys) == 0
    assert (store / ROOT_KEY).read_bytes() == before
    assert assert_told(["verify", str(store)], capsys) == 0


@pytest.mark.parametrize("field", [field for field in FIELDS if field != "root_copy"])
def test_a_root_that_is_wrong_is_restored_from_its_copy(field, tmp_path, capsys):
    store = build(tmp_path / "store")
    before = (store / ROOT_KEY).read_bytes()
    seal(store, setting(field, ["x"]), copy=False)
    for path, document in record_nodes(parse_record(json.loads(before)["attributes"][ATTRIBUTE], "a test")).items():
        (store / node_key(path)).write_bytes(metadata_bytes(document))
    assert assert_told(["repair", str(store)], capsys) == 0
    assert (store / ROOT_KEY).read_bytes() == before
