"""Parquet files and Hugging Face datasets: the same rows as in JSON Lines give the same samples."""

import json
from contextlib import closing

import pytest

from dspark_store.sources import ChatSource, SourceError
from dspark_store.sources.files import open_rows
from dspark_store.sources.identity import comparable, without_rules
from dspark_store.sources.options import ChatOptions
from tests.sources.shapes import SHAPES
from tests.sources.words import CHAT, write_rows
from tests.tiny import tiny_tokenizer, write_chats

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

CALL = {"function": {"name": "f", "arguments": '{"x": 1}'}, "id": None, "type": "function"}
TOOLS = {"messages": [CHAT[0], {"role": "assistant", "content": None, "tool_calls": [CALL]}]}


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    path = write_chats(tmp_path_factory.mktemp("tables") / "chats.jsonl", 60)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    write_rows(path, *rows, TOOLS)
    return path


@pytest.fixture(scope="module")
def table(chats):
    return pa.Table.from_pylist([json.loads(line) for line in chats.read_text().splitlines()])


def samples_of(data, **options):
    source = ChatSource(data, tiny_tokenizer(), seq_length=200, **options)
    return [(sample.input_ids.tolist(), sample.loss_mask.tolist(), sample.cursor) for sample in source.read()]


@pytest.mark.parametrize("options", [{}, {"shuffle_seed": 3}, {"shuffle_seed": 3, "split": "train[10%:50%]"}])
def test_parquet_gives_the_samples_of_json_lines(tmp_path, chats, table, options):
    pq.write_table(table, tmp_path / "chats.parquet", row_group_size=4)
    assert samples_of(tmp_path / "chats.parquet", **options) == samples_of(chats, **options)


def test_a_directory_of_parquet_files_is_all_of_them(tmp_path, chats, table):
    pq.write_table(table.slice(0, 7), tmp_path / "0.parquet")
    pq.write_table(table.slice(7), tmp_path / "1.parquet")
    assert samples_of(tmp_path) == samples_of(chats)


def test_a_parquet_row_is_told_by_its_number_and_other_columns_are_not_read(tmp_path, table):
    pq.write_table(table.append_column("picture", pa.array([b"\xff"] * len(table))), tmp_path / "a.parquet")
    with closing(open_rows(tmp_path / "a.parquet")) as rows:
        assert rows.where(3) == f"{tmp_path / 'a.parquet'}, row 4"
        assert list(rows.take([0])[0]) == ["messages"]


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path, table: path.write_text("a,b\n1,2\n"), "a.parquet cannot be read as parquet"),
        (lambda path, table: pq.write_table(table.slice(0, 0), path), "a.parquet has no rows"),
        (
            lambda path, table: pq.write_table(pa.table({"text": ["a"]}), path),
            "has the columns text; expected messages",
        ),
    ],
)
def test_a_parquet_file_that_is_no_use_says_why(tmp_path, table, write, message):
    write(tmp_path / "a.parquet", table)
    with pytest.raises(SourceError, match=message):
        open_rows(tmp_path / "a.parquet")


def test_a_damaged_row_group_says_so(tmp_path, table):
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=8, compression="zstd")
    data = bytearray((tmp_path / "a.parquet").read_bytes())
    data[100:400] = b"\xff" * 300
    (tmp_path / "a.parquet").write_bytes(data)
    with pytest.raises(SourceError, match=r"a\.parquet cannot be read as parquet"):
        samples_of(tmp_path / "a.parquet")


def test_a_saved_dataset_gives_the_samples_of_json_lines(tmp_path, chats, table):
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset(table)
    dataset.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": dataset, "test": dataset.select([0])}).save_to_disk(tmp_path / "splits")
    expected = samples_of(chats, shuffle_seed=1)
    assert samples_of(tmp_path / "one", shuffle_seed=1) == expected
    assert samples_of(tmp_path / "splits", shuffle_seed=1) == expected
    assert len(samples_of(tmp_path / "splits", split="test")) == 1
    assert samples_of(tmp_path / "splits", split="train[:5]", shuffle_seed=1) == expected[:5]
    with pytest.raises(SourceError, match="has no split 'dev'; it has train, test"):
        samples_of(tmp_path / "splits", split="dev[:5]")
    one, same = (ChatSource(tmp_path / name, tiny_tokenizer(), seq_length=9) for name in ("one", "splits"))
    assert one.identity() == same.identity()


def test_a_dataset_that_the_hub_does_not_have_is_one_line():
    pytest.importorskip("datasets")
    with pytest.raises(SourceError, match="dataset nobody/nothing cannot be loaded") as error:
        open_rows("nobody/nothing")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "split",
    ["train", "train[:7]", "train[5:70]", "train[:10%]", "train[25%:75%]", "train[-9:]", "train[:-9]", "train[5:50%]"],
)
def test_automodels_order_is_that_of_the_library_for_tables_and_the_files_for_json(tmp_path, chats, table, split):
    datasets = pytest.importorskip("datasets")
    pq.write_table(table, tmp_path / "chats.parquet")
    automodels_own = split.endswith(("[:7]", "[5:70]"))  # it hands every other split to the library
    files = {"data_files": str(tmp_path / "chats.parquet"), "cache_dir": str(tmp_path / "cache")}
    loaded = datasets.load_dataset("parquet", split="train" if automodels_own else split, **files).shuffle(seed=3)
    if automodels_own:
        loaded = loaded.select(list(range(len(loaded)))[5 * (split == "train[5:70]") : int(split[:-1].split(":")[1])])
    write_rows(tmp_path / "expected.jsonl", *loaded)
    options = {"options": ChatOptions(order="automodel"), "shuffle_seed": 3, "split": split}
    assert samples_of(tmp_path / "chats.parquet", **options) == samples_of(tmp_path / "expected.jsonl")
    assert samples_of(chats, **options) == samples_of(chats)
    assert samples_of([chats, tmp_path / "expected.jsonl"], **options) == samples_of(
        [chats, tmp_path / "expected.jsonl"]
    )


def test_a_split_that_automodel_does_not_look_at_is_told(chats, caplog):
    ChatSource(chats, tiny_tokenizer(), ChatOptions(order="automodel"), seq_length=200, split="train[:7]")
    assert "split train[:7] takes nothing away: NeMo Automodel reads all rows of JSON files" in caplog.text


def test_an_order_is_part_of_the_identity_where_it_is_given(chats):
    own = ChatSource(chats, tiny_tokenizer(), seq_length=200).identity()
    other = ChatSource(chats, tiny_tokenizer(), ChatOptions(order="automodel"), seq_length=200).identity()
    assert other == {**own, "order": "automodel"}


SHOWN = (
    "{{ tools | tojson if tools }}"
    "{% for m in messages %}<s> {{ m.role }} {% if m.content is not defined %}none{% else %}{{ m.content }}{% endif %} "
    "{{ m.keys() | list | sort | join(' ') }} {{ m.tool_calls | tojson if m.tool_calls }} </s> {% endfor %}"
)


def tool(**properties):
    return {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": properties}}}


def called(**arguments):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [call]}]


UNLIKE = [
    {"messages": called(city="w1"), "tools": [tool(city={"type": "string"})]},
    {"messages": called(days=[1, None], deep={"a": 1}), "tools": [tool(days={"type": "array"}, deep={"enum": ["a"]})]},
    {"messages": called(deep={"b": 2}), "tools": [tool(deep={"type": "object", "title": "t"})]},
    {"messages": [{"role": "user", "content": "hi", "name": "n"}, {"role": "assistant", "content": "yo"}]},
    {"messages": [{"role": "assistant", "reasoning_content": "r1"}, {"role": "tool", "content": "ok"}]},
]


def test_rows_of_unlike_keys_are_alike_in_every_kind_of_file(tmp_path):
    datasets = pytest.importorskip("datasets")
    table = pa.Table.from_pylist(UNLIKE)
    assert "null" in json.dumps(table.to_pylist()[0])  # what a columnar file makes of keys that other rows have
    pq.write_table(table, tmp_path / "rows.parquet")
    datasets.Dataset(table).save_to_disk(tmp_path / "saved")
    tokenizer = SHAPES[0].tokenizer(tagged=False)
    tokenizer.chat_template = SHOWN
    read = []
    for name in (write_rows(tmp_path / "rows.jsonl", *UNLIKE), tmp_path / "rows.parquet", tmp_path / "saved"):
        samples = list(ChatSource(name, tokenizer, seq_length=4000).read())
        read.append([(tokenizer.decode(sample.input_ids), sample.loss_mask.tolist()) for sample in samples])
    assert read[0] == read[1] == read[2]
    for row, (text, _) in zip(UNLIKE[:3], read[0], strict=False):
        assert text == tokenizer.apply_chat_template(row["messages"], tools=row["tools"], tokenize=False)


def test_columns_that_rule_1_did_not_read_leave_the_content_that_its_stores_name(tmp_path):
    datasets = pytest.importorskip("datasets")
    systems = {"plain": {}, "french": {"system": ["French."] * 3}, "dutch": {"system": ["Dutch."] * 3}}
    found = {}
    for name, more in systems.items():
        datasets.Dataset.from_dict({"messages": [CHAT] * 3, **more}).save_to_disk(tmp_path / name)
        found[name] = ChatSource(tmp_path / name, tiny_tokenizer(), seq_length=200).identity()
    assert without_rules(found["plain"]) == without_rules(found["french"]) == without_rules(found["dutch"])
    assert len({identity.get("beside_sha256") for identity in found.values()}) == 3
    assert comparable(found["french"], found["dutch"]) == (found["french"], found["dutch"])
