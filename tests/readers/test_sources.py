import pytest

from dspark_store import open_cache
from dspark_store.format.damage import DamagedStoreError
from dspark_store.format.metadata import write_metadata
from dspark_store.format.storage import LocalStorage
from dspark_store.readers.epoch import Split, choose_samples
from dspark_store.writers.publish import settle_tokens
from dspark_store.writers.tokens import write_token_shard
from tests.writers.small_store import BLENDED, build_blended, random_tokens, small_record


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return build_blended(tmp_path_factory.mktemp("blended") / "store")


@pytest.fixture(scope="module")
def cache(root):
    return open_cache(root)


def choose(cache, sources, **options):
    return choose_samples(cache, min_supervised=0, **{"split": None, **options}, sources=sources).tolist()


def test_a_sample_knows_its_source(cache):
    assert cache.source.tolist() == [0, 1, 2, 1, 0, 2]
    assert [cache.sources[number] for number in cache.source[:3]] == list(BLENDED)


def test_samples_are_chosen_by_source(cache):
    assert choose(cache, ["code"]) == [1, 3]
    assert choose(cache, ["papers", "chats"]) == [0, 2, 4, 5]
    assert choose(cache, None) == [0, 1, 2, 3, 4, 5]


def test_sources_and_a_split_together_restrict_the_choice(cache):
    sides = [choose(cache, ["chats", "code"], split=Split(side, 0.5, 1)) for side in ("train", "validation")]
    assert sorted([*sides[0], *sides[1]]) == [0, 1, 3, 4]


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        (["cod"], "no source 'cod'; the nearest is 'code'"),
        ("code", r"a list of names, got 'code'; give \['code'\]"),
        ([], "no sample is left"),
    ],
)
def test_a_source_that_is_not_there_is_refused(cache, sources, message):
    with pytest.raises(ValueError, match=message):
        choose(cache, sources)


def test_a_store_of_one_source_has_no_names(tmp_path):
    storage = LocalStorage(tmp_path)
    write_metadata(storage, small_record())
    write_token_shard(storage, small_record(), 0, random_tokens((3, 3), 0), cursor=0)
    settle_tokens(storage, small_record())
    cache = open_cache(tmp_path, allow_incomplete=True)
    assert cache.sources == ()
    assert cache.source.tolist() == [0, 0]
    with pytest.raises(ValueError, match="no source 'chats'; it was not made from a blend"):
        choose(cache, ["chats"])


def test_damage_to_the_index_of_sources_is_found(root, cache, tmp_path):
    storage = LocalStorage(tmp_path)
    for path in root.rglob("*"):
        if path.is_file():
            storage.put(path.relative_to(root).as_posix(), path.read_bytes())
    path = storage.path("index/source/c.0")
    path.write_bytes(storage.read("index/source/c.0")[::-1])
    with pytest.raises(DamagedStoreError, match="index array index/source"):
        _ = open_cache(tmp_path).source
