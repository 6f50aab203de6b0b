import pytest

from dspark_store.cli.train import parse_arguments
from dspark_store.train import main
from tests.training.runs import flags

REQUIRED = ["--output-dir", "run", "--mask-token-id", "7"]


def test_a_file_fills_the_settings_and_a_flag_wins(tmp_path):
    path = tmp_path / "train.yaml"
    path.write_text("output-dir: run\nmask_token_id: 7\nstore: here\nlayers: [1, 3]\ngamma: 4\nlearning_rate: 1.0e-3\n")
    config = parse_arguments(["-c", str(path), "--store", "there"])
    assert (config.output_dir, config.mask_token_id, config.store) == ("run", 7, "there")
    assert (config.layers, config.gamma, config.learning_rate) == ((1, 3), 4.0, 1e-3)
    assert (config.block_size, config.num_anchors, config.markov_rank, config.draft_layers) == (7, 512, 256, 5)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ([], "give either --store, to train from it, or --online"),
        (["--store", "a", "--online", "b"], "give either --store"),
        (["--store", "a", "--batch-size", "0"], "batch-size must be >= 1, got 0"),
        (["--store", "a", "--layers", "1", "3", "1"], "layers name 1 more than once"),
        (["--store", "a", "--clip", "0"], "clip must be a finite number > 0"),
        (["--store", "a", "--validation-fraction", "1"], "validation-fraction must be"),
        (["--store", "a", "--markov", "lstm"], "invalid choice: 'lstm'"),
        (["--store", "a", "--learning-rate", "-1"], "learning-rate must be >= 0"),
        (["--store", "a", "--l1-weight", "x"], "invalid float value: 'x'"),
    ],
)
def test_a_setting_that_cannot_be_ends_the_command_in_one_line(more, named, capsys):
    assert main([*REQUIRED, *more]) == 2
    text = capsys.readouterr().err
    assert named in text
    assert text.count("\n") == 1


def test_what_a_store_is_not_ends_the_command_in_one_line(store, tmp_path, capsys):
    assert main(flags(tmp_path / "run", "--store", tmp_path / "nothing")) == 2
    assert "nothing" in capsys.readouterr().err
    assert main(flags(tmp_path / "run", "--store", store, "--mask-token-id", 288)) == 2
    assert "mask_token_id 288 is outside the vocabulary of 288" in capsys.readouterr().err
    assert main(flags(tmp_path / "run", "--store", store, "--layers", 1, 9)) == 2
    assert "layer 9 was not captured" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_an_error_of_a_kind_that_nobody_foresaw_is_one_line_too(store, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("dspark_store.training.loop.build_draft", fail)
    assert main(flags(tmp_path / "run", "--store", store)) == 3
    assert (
        capsys.readouterr().err.splitlines()[-1]
        == "error: RuntimeError: CUDA out of memory (--log-level DEBUG shows where)"
    )


def fail(*given):
    raise RuntimeError("CUDA out\nof memory")


def test_what_all_ranks_were_given_wrongly_is_told_by_rank_0(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    assert main([*REQUIRED, "--store", "a", "--clip", "0"]) == 2
    assert capsys.readouterr().err == ""
