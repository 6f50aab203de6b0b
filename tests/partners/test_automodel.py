"""NeMo Automodel's own precompute script, run by the real package, with this store in the place of its cache module."""

import importlib
import sys

import pytest
import torch
import transformers

import dspark_store
from tests.tiny import save_target_dir, write_chats

pytest.importorskip("nemo_automodel", reason="needs the environment of make partners")


class OnTheCpu:
    """Its own loader asks for CUDA wherever torch was built for it."""

    @staticmethod
    def from_pretrained(name, *, force_hf, **options):
        return transformers.AutoModelForCausalLM.from_pretrained(name, **options)


@pytest.mark.parametrize("flags", [[], ["--mask-generation-prompt", "--mask-reasoning-content"]])
def test_its_precompute_script_fills_a_store_and_refuses_to_resume_it_with_another_mask(flags, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "nemo_automodel.components.datasets.llm.dspark_cache", dspark_store)
    monkeypatch.delitem(sys.modules, "nemo_automodel.components.speculative.precompute_dspark", raising=False)
    script = importlib.import_module("nemo_automodel.components.speculative.precompute_dspark")
    monkeypatch.setattr(script, "NeMoAutoModelForCausalLM", OnTheCpu)
    target, chats = save_target_dir(tmp_path / "target"), write_chats(tmp_path / "chats.jsonl", 5)
    arguments = [
        *("--target-model", str(target), "--input-data", str(chats), "--output-dir", str(tmp_path / "store")),
        *("--seq-length", "48", "--batch-size", "2", "--shard-size", "2", "--device", "cpu", "--target-force-hf"),
    ]
    assert script.main([*arguments, *flags]) == 0
    manifest = dspark_store.read_manifest(tmp_path / "store")
    assert (manifest["num_samples"], manifest["mask_generation_prompt"]) == (5, bool(flags))
    cache = dspark_store.open_cache(tmp_path / "store")
    assert len(cache) == 5
    assert torch.isfinite(cache[0]["target_last_hidden_states"].float()).all()
    with pytest.raises(ValueError, match=r"does not match.*mask_generation_prompt"):
        script.main([*arguments, "--resume", *([] if flags else ["--mask-generation-prompt"])])
