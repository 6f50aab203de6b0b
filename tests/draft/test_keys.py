import torch

from dspark_store.draft.keys import generated_keys, sample_keys

GAMMA = 0x9E3779B97F4A7C15


def test_a_key_is_a_function_of_seed_epoch_sample_and_position_alone():
    both = sample_keys(torch.tensor([7, 3]), 9, seed=1, epoch=2)
    alone = sample_keys(torch.tensor([3]), 5, seed=1, epoch=2)
    assert torch.equal(both[1, :5], alone[0])


def test_keys_are_those_of_splitmix64():
    """Another order of anchors is another training run: these may change with a new version only."""
    words = [[key_by_hand(3, 1, sample, position) for position in (1, 2)] for sample in (0, 5)]
    assert sample_keys(torch.tensor([0, 5]), 2, seed=3, epoch=1).tolist() == words
    assert words[0][1] == 2159198217602378625


def key_by_hand(seed, epoch, sample, position):
    word = mixed(seed ^ 0x616E63686F727300)
    word = mixed(word + GAMMA * (epoch + 1))
    word = mixed(word + GAMMA * (sample + 1))
    return mixed(word + GAMMA * position) >> 2


def mixed(word):
    word &= 2**64 - 1
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return word ^ (word >> 31)


def test_seed_epoch_sample_and_position_each_change_the_key():
    samples = torch.arange(50)
    keys = [sample_keys(samples, 8, seed=seed, epoch=epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert torch.stack(keys).unique().numel() == 4 * 50 * 8


def test_keys_are_spread_evenly():
    keys = sample_keys(torch.arange(400), 100, seed=0, epoch=0)
    assert int(keys.min()) >= 0
    assert int(keys.max()) < 2**62
    assert abs(float((keys.double() / 2**62).mean()) - 0.5) < 0.01
    low = (keys & 1).double().mean()
    assert abs(float(low) - 0.5) < 0.01


def test_generated_keys_follow_their_generator():
    first, second = (generated_keys(2, 5, torch.Generator().manual_seed(seed)) for seed in (4, 4))
    assert torch.equal(first, second)
