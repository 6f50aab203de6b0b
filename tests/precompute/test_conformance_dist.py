"""What the tests of NeMo Automodel's distributed precompute assert, asked of this one through Automodel's own YAML.

R1 to R13 are the names by which docs/design.md and the issues know the rows; R9 is about the plan for a target's type,
R11 (the number of steps that ranks agree on) has nothing that it could be about here.
"""

import json
from pathlib import Path

import pytest
import torch
import yaml

import dspark_store as ds
from dspark_store.cli.precompute import parse_arguments
from dspark_store.precompute import tokenise as tokenise_module
from dspark_store.precompute.__main__ import main
from dspark_store.sources import chat_template_sha256
from dspark_store.target.parallel import ParallelPlan
from tests.precompute.jobs import answers, fill_module, interrupt, refused, sharded_module, states_of_files, write_rows
from tests.tiny import HIDDEN_SIZE, save_target_dir, tiny_qwen3, tiny_tokenizer

REPLICATED = (Path(__file__).parents[1] / "compat" / "configs" / "replicated.yaml").read_text()
TEXTS = ["one", "two", "three"]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return save_target_dir(tmp_path_factory.mktemp("targets") / "target", tiny_qwen3())


@pytest.fixture
def root(target, tmp_path):
    """A directory with a target, three chats and Automodel's configuration of a job over them."""
    (tmp_path / "target").symlink_to(target)
    write_rows(tmp_path / "data.jsonl", TEXTS)
    write(tmp_path)
    return tmp_path


def write(root, **changes):
    """Write the configuration with changes to ``recipe_args``; a change to None leaves the key out."""
    document = yaml.safe_load(REPLICATED.replace("{root}", str(root)))
    recipe = {**document["recipe_args"], **changes}
    document["recipe_args"] = {key: value for key, value in recipe.items() if value is not None}
    (root / "job.yaml").write_text(yaml.safe_dump(document))


def words(root):
    return ["-c", str(root / "job.yaml"), "--device", "cpu"]


def run(root):
    assert main(words(root)) == 0
    return root / "store"


def test_r1_the_settings_of_the_cache_come_from_the_recipe(root):
    config = parse_arguments(words(root))
    assert (config.output_dir, config.dtype, config.shard_size) == (str(root / "store"), "fp32", 2)
    assert config.batch_size == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cache_output_dir": None}, "cache_output_dir is required"),
        ({"cache_output_dir": ""}, "cache_output_dir is required"),
        ({"cache_dtype": "int8"}, "cache_dtype must be one of bf16, fp16, fp32, got 'int8'"),
        ({"cache_shard_size": 3}, "multiple of micro_batch_size"),
        ({"cache_shard_size": 0}, "cache_shard_size must be >= 1"),
    ],
)
@pytest.mark.usefixtures("no_target")
def test_r2_a_cache_that_cannot_be_is_refused_at_once(root, capsys, changes, message):
    write(root, **changes)
    assert message in refused(words(root), capsys, at_once=True)
    assert not (root / "store").exists()


def test_r3_the_manifest_has_the_dimensions_and_the_identity(root):
    write(root, train_split="train[:2]", shuffle_seed=7, mask_reasoning_content=True)
    manifest = ds.read_manifest(run(root))
    upstream = {
        "target_model": str(root / "target"),
        "target_model_type": "qwen3",
        "target_vocab_size": 288,
        "seq_length": 16,
        "dtype": "fp32",
        "shard_size": 2,
        "hidden_size": HIDDEN_SIZE,
        "num_hidden_layers": 4,
        "target_hidden_dim": 2 * HIDDEN_SIZE,
        "target_last_hidden_dim": HIDDEN_SIZE,
        "target_layer_ids": [1, 3],
        "num_samples": 3,  # upstream takes no slice of JSON Lines
        "train_data_path": str(root / "data.jsonl"),
        "train_split": "train[:2]",
        "shuffle_seed": 7,
        "mask_reasoning_content": True,
        "chat_template_sha256": chat_template_sha256(tiny_tokenizer()),
    }
    assert {name: manifest[name] for name in upstream} == upstream
    assert {"source", "tokenizer_sha256", "target_weights", "batch_size", "batching", "compute_dtype"} < set(manifest)


def test_r4_more_samples_are_another_configuration(root, capsys):
    store = run(root)
    before = states_of_files(store)
    write_rows(root / "data.jsonl", [*TEXTS, "four"])
    assert "does not match this run in source.content_sha256: " in refused(words(root), capsys)
    assert states_of_files(store) == before


def test_r5_every_field_of_the_identity_is_named_when_it_changes(root, capsys, no_target_after):
    store = run(root)
    no_target_after()
    before = states_of_files(store)
    for key, value, field in [
        ("train_split", "train[:2]", "train_split"),
        ("shuffle_seed", 7, "shuffle_seed"),
        ("mask_reasoning_content", True, "mask_reasoning_content"),
        ("chat_template", "{{ messages }}", "chat_template_sha256"),
    ]:
        write(root, **{key: value})
        line = refused(words(root), capsys)
        assert "does not match" in line
        assert f" {field}: store " in line
    assert states_of_files(store) == before


@pytest.fixture
def no_target_after(monkeypatch):
    """Forbid from now on that a target is loaded."""

    def load(*args, **options):
        raise AssertionError("the target was loaded")

    return lambda: monkeypatch.setattr(sharded_module, "load_target", load)


def test_r6_an_interrupted_store_is_gone_on_with_and_no_consumer_takes_it(root):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fill_module, "complete_store", interrupt)
        assert main(words(root)) == 130
    with pytest.raises(ValueError, match="incomplete"):
        ds.read_manifest(root / "store")
    assert ds.read_manifest(root / "store", allow_incomplete=True)["complete"] is False
    assert ds.read_manifest(run(root))["complete"] is True


def test_r7_the_same_template_has_the_same_hash(target):
    tokenizer, other = tiny_tokenizer(), tiny_tokenizer("plain")
    assert chat_template_sha256(tokenizer) == chat_template_sha256(tiny_tokenizer())
    assert chat_template_sha256(tokenizer) != chat_template_sha256(other)
    other.chat_template = None
    assert chat_template_sha256(tokenizer) != chat_template_sha256(other)


@pytest.mark.usefixtures("no_target")
def test_r8_a_multimodal_target_is_refused(root, capsys):
    (root / "target").unlink()
    (root / "target").mkdir()
    (root / "target" / "config.json").write_text(json.dumps({"model_type": "minimax_m3_vl"}))
    assert "multimodal" in refused(words(root), capsys)


@pytest.mark.parametrize(
    ("model_type", "ep_size", "kind"),
    [
        ("deepseek_v4", 1, "fsdp2"),
        ("deepseek_v4", 4, "fsdp2+ep"),
        ("glm_moe_dsa", 8, "ep"),
        ("kimi_linear", 2, "fsdp2+ep"),
        ("qwen3", 1, "replicated"),
    ],
)
def test_r9_large_targets_are_sharded_over_all_ranks_and_others_replicated(root, model_type, ep_size, kind):
    config = parse_arguments([*words(root), "--ep-size", str(ep_size)])
    plan = ParallelPlan(8, fsdp=config.resolved_fsdp_size(model_type, 8), ep=config.ep_size)
    assert plan.kind == kind
    assert plan.replicas == (8 if kind == "replicated" else 1)


def test_r10_a_dense_target_is_loaded_plainly_with_the_dtype_and_the_attention(root, monkeypatch):
    loaded = []

    def load(source, **options):
        loaded.append((source, options, load_target(source, **options)))
        return loaded[-1][2]

    load_target = sharded_module.load_target
    monkeypatch.setattr(sharded_module, "load_target", load)
    run(root)
    ((source, options, model),) = loaded
    assert (source.model, source.trust_remote_code) == (str(root / "target"), False)
    assert (options["dtype"], options["attn_implementation"]) == (torch.float32, "eager")
    assert (model.config.model_type, model.config._attn_implementation) == ("qwen3", "eager")
    assert model.dtype == torch.float32


def test_r12_a_whole_run_and_the_same_again_which_computes_nothing(root, no_target_after, monkeypatch, capsys):
    store = run(root)
    dataset = ds.CachedDSparkDataset(store)
    assert len(dataset) == 3
    assert sorted(answers(ds.open_cache(store), tiny_tokenizer())) == sorted(TEXTS)
    assert [dataset[row]["target_hidden_states"].shape for row in range(3)] == [(16, 2 * HIDDEN_SIZE)] * 3
    embed, head = ds.read_target_weight_modules(store)
    weights = tiny_qwen3().state_dict()
    assert torch.equal(embed.weight, weights["model.embed_tokens.weight"])
    assert torch.equal(head.weight, weights["lm_head.weight"])
    before = states_of_files(store)
    no_target_after()
    monkeypatch.setattr(tokenise_module, "write_token_shard", interrupt)
    run(root)
    assert "complete; nothing to do" in capsys.readouterr().out
    assert states_of_files(store) == before
    assert len(ds.CachedDSparkDataset(store)) == 3


def test_r13_the_command_parses_runs_and_returns_the_code(root, monkeypatch):
    codes = {parse_arguments(words(root)): 7}
    monkeypatch.setattr("dspark_store.precompute.run.run", lambda config: codes[config])
    assert main(words(root)) == 7
