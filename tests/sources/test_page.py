"""docs/sources.md: its snippets run, and what it names as a source can be read."""

import contextlib
import re
from pathlib import Path

import pytest
import yaml

from dspark_store.sources import SourceContext, build_source, parse_source, source_names
from dspark_store.sources.megatron.builder import PairBuilder
from dspark_store.sources.parts import parse_parts

PAGE = Path(__file__).parents[2].joinpath("docs", "sources.md").read_text(encoding="utf-8")
YAML = [
    value["input_data"]
    for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    for value in yaml.safe_load_all(block)
]


def run_snippet(holding):
    (snippet,) = (text for text in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if holding in text)
    exec(compile(snippet, "docs/sources.md", "exec"), {})  # noqa: S102 - it is what readers paste


def test_a_blend_is_built_and_read_as_it_says(capsys):
    run_snippet("blend.read()")
    assert capsys.readouterr().out


def test_a_pair_is_written_as_it_says(tmp_path):
    with contextlib.chdir(tmp_path):
        with PairBuilder("corpus/books") as books:
            books.add_document([7])
        run_snippet("PairBuilder")
        pair = build_source(parse_source("corpus/wiki"), SourceContext(seq_length=8, shuffle_seed=None))
        samples = list(pair.read())
    assert [sample.input_ids.tolist() for sample in samples] == [[1, 2, 3], [4, 5, 6], [7]]


@pytest.mark.parametrize("value", YAML, ids=str)
def test_every_source_in_it_is_one(value):
    spec = parse_source(value)
    assert spec.type in source_names()
    if spec.type == "blend":
        assert all(part.source.type in source_names() for part in parse_parts(spec.options["sources"]))
    if spec.type == "dummy":
        assert len(build_source(spec, SourceContext(seq_length=512))) == 1000


def test_the_forms_of_weights_say_the_same():
    start = PAGE.index("# weights.yaml")
    documents = yaml.safe_load_all(PAGE[start : PAGE.index("```", start)])
    forms = [parse_parts(parse_source(value["input_data"]).options["sources"]) for value in documents]
    assert len(forms) == 4
    assert all(parts == forms[0] for parts in forms)
