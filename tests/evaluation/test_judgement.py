import pytest
import torch

from dspark_store.evaluation.decoder import Greedy, Speculated
from dspark_store.evaluation.judgement import NEAR, Judgement, compare, prompts_of
from dspark_store.readers.cache import open_cache
from tests.stores import build_store

OWN = Greedy([4, 5, 6, 7], [1.0, 1.0, 1e-5, 1.0])


@pytest.mark.parametrize(
    ("tokens", "near", "differing"),
    [([4, 5, 6, 7], 0, 0), ([4, 5, 9, 9], 1, 0), ([4, 9, 6, 7], 0, 1), ([4, 5, 6], 1, 0), ([4, 5], 0, 1)],
)
def test_a_text_that_leaves_the_targets_own_is_counted_by_how_near_the_tie_was(tokens, near, differing):
    judgement = compare(OWN, Speculated(tokens, 2))
    assert (judgement.near_ties, judgement.differing) == (near, differing)


@pytest.mark.parametrize(("near_tie", "near"), [(1e-4, 0), (0.5, 0), (1.5, 1)])
def test_how_near_a_tie_is_depends_on_what_the_target_computes_in(near_tie, near):
    judgement = compare(OWN, Speculated([4, 9, 6, 7], 2), near_tie)
    assert (judgement.near_ties, judgement.differing) == (near, 1 - near)
    assert NEAR[torch.float32] == 1e-4 < NEAR[torch.float16] < NEAR[torch.bfloat16]


def test_judgements_add_up_before_they_are_divided():
    total = compare(OWN, Speculated([4, 5, 6, 7], 1)) + compare(OWN, Speculated([4, 5, 6, 7], 3))
    assert total == Judgement(prompts=2, tokens=6, steps=4)
    assert total.tokens_per_step == 1.5


def test_nothing_judged_is_no_tokens():
    assert Judgement().tokens_per_step == 0.0


def test_a_prompt_is_what_stands_before_the_first_supervised_token(tmp_path):
    store = build_store(tmp_path / "store")
    cache = open_cache(store.path)
    expected = []
    for sample in store.samples:
        supervised = sample.mask.nonzero()[0]
        if supervised.size and supervised[0] > 0:
            expected.append(sample.ids[: supervised[0]].tolist())
    assert list(prompts_of(cache, range(len(cache)))) == expected
    assert expected
