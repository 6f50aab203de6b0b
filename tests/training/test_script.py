"""A script written against NeMo Automodel's interface trains with nothing changed but the line that imports it.

That line was ``from nemo_automodel.components.datasets.llm.dspark_cache import`` these three names.
"""

from typing import Any

import torch

from dspark_store import build_cached_dspark_dataloader, read_manifest, read_target_weight_modules
from dspark_store.draft.anchors import draw_blocks
from dspark_store.draft.loss import LossWeights, loss_sums, slot_terms
from dspark_store.draft.model import Draft
from dspark_store.draft.settings import DraftSettings


def upstream_training(cache_dir, steps):
    manifest: Any = read_manifest(cache_dir)
    embed_tokens, lm_head = read_target_weight_modules(cache_dir)
    loader = build_cached_dspark_dataloader(
        cache_dir=cache_dir, batch_size=2, shuffle=True, num_workers=0, distributed=False
    )
    settings = DraftSettings(
        vocab_size=manifest["target_vocab_size"],
        hidden_size=manifest["hidden_size"],
        captured_layers=len(manifest["target_layer_ids"]),
        mask_token_id=manifest["target_vocab_size"] - 1,
        num_layers=1,
        num_heads=4,
        num_kv_heads=4,
        head_dim=8,
        intermediate_size=32,
        block_size=3,
        markov_rank=4,
    )
    torch.manual_seed(0)
    draft = Draft(settings, embed_tokens.weight, lm_head.weight)
    optimizer = torch.optim.AdamW(draft.trainable(), lr=3e-3)
    losses: list[float] = []
    while len(losses) < steps:
        for batch in loader:
            ids, mask = batch["input_ids"], batch["loss_mask"]
            blocks = draw_blocks(ids, mask, torch.randint(2**62, ids.shape), num_anchors=4, block_size=3)
            output = draft(batch["target_hidden_states"], blocks)
            terms = slot_terms(draft, output, batch["target_last_hidden_states"], blocks)
            loss = loss_sums(terms, output.confidence, blocks).total(LossWeights())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    return losses


def test_the_script_trains(store):
    losses = upstream_training(store, 30)
    assert sum(losses[-5:]) < sum(losses[:5])
