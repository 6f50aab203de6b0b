"""A tiny draft, batches that it learns from, and a case that is worked out by hand."""

from dataclasses import dataclass, replace

import torch

from dspark_store.draft.anchors import Anchors, Blocks, Packing, draw_blocks
from dspark_store.draft.loss import SlotTerms, compared, loss_sums, slot_terms
from dspark_store.draft.model import Draft
from dspark_store.draft.settings import DraftSettings

VOCAB, WIDTH, LAYERS = 37, 16, 3
SETTINGS = DraftSettings(
    vocab_size=VOCAB,
    hidden_size=WIDTH,
    captured_layers=LAYERS,
    mask_token_id=VOCAB - 1,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=24,
    block_size=4,
    markov_rank=6,
)
MARKOV_KINDS = ["vanilla", "gated", "rnn", "none"]


@dataclass(frozen=True)
class Batch:
    """One batch with its anchors drawn: ids and mask (B, S), states (B, S, L * H), last states (B, S, H)."""

    ids: torch.Tensor
    mask: torch.Tensor
    states: torch.Tensor
    last: torch.Tensor
    blocks: Blocks
    packing: Packing | None = None


def random_(seed=0):
    return torch.Generator().manual_seed(seed)


def tiny_draft(seed=0, **changes):
    """Weights that are larger than a fresh draft's, so that every part has a say in the logits."""
    settings = replace(SETTINGS, **changes)
    tables = torch.randn(2, settings.vocab_size, settings.hidden_size, generator=random_(seed + 1))
    bias = torch.randn(settings.vocab_size, generator=random_(seed + 2)) if settings.head_bias else None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        draft = Draft(settings, tables[0], tables[1] / 4, bias)
        for parameter in draft.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.2)
    return draft


def tiny_batch(mask=None, rows=2, width=16, num_anchors=5, block_size=4, seed=0, packing=None):
    random = random_(seed)
    if mask is None:
        mask = (torch.rand(rows, width, generator=random) < 0.8).long()
    rows, width = mask.shape
    ids = torch.randint(VOCAB - 1, (rows, width), generator=random)
    states = torch.randn(rows, width, LAYERS * WIDTH, generator=random)
    last = torch.randn(rows, width, WIDTH, generator=random)
    remaining = None if packing is None else packing.doc_remaining
    keys = random_keys(rows, width, random)
    blocks = draw_blocks(ids, mask, keys, num_anchors=num_anchors, block_size=block_size, doc_remaining=remaining)
    return Batch(ids, mask, states, last, blocks, packing)


def random_keys(rows, width, random=None):
    """Keys (rows, width) from a generator of torch."""
    return torch.randint(2**62, (rows, width), generator=random)


def teacher_logits(draft, batch):
    """The target's own logits (B, N, K, V) for all slots at once."""
    with torch.no_grad():
        return draft.head_logits(draft.teacher_states(batch.last, batch.blocks))


def terms_of_logits(draft, teacher, blocks):
    """The terms of logits (B, N, K, V)."""
    counts = blocks.supervised
    return SlotTerms.of(compared(draft[counts], teacher[counts], blocks.labels[counts]), blocks)


def all_logits(draft, output):
    """Logits (B, N, K, V) of all slots at once, which training does not make."""
    latents = () if output.latents is None else (output.latents,)
    return draft.slot_logits(output.hidden, *latents)


def sums_of(draft, batch, gamma=None):
    """The terms of the loss of a batch."""
    output = draft(batch.states, batch.blocks, batch.packing)
    return loss_sums(slot_terms(draft, output, batch.last, batch.blocks), output.confidence, batch.blocks, gamma)


def packed(*lengths):
    """The packing of one row of documents of these lengths."""
    positions = [position for length in lengths for position in range(length)]
    remaining = [left for length in lengths for left in reversed(range(length))]
    return Packing(torch.tensor([positions]), torch.tensor([remaining]))


TEACHER = torch.tensor([0.25, 0.75]).log().expand(1, 1, 3, 2)
DRAFT = torch.tensor([0.75, 0.25]).log().expand(1, 1, 3, 2)
UNSURE = torch.zeros(1, 1, 3)


def hand_sums(blocks, gamma=None, *, logits=DRAFT, confidence=UNSURE):
    return loss_sums(terms_of_logits(logits, TEACHER, blocks), confidence, blocks, gamma)


def hand_blocks(*supervised):
    """A block whose labels are all 0."""
    zeros = torch.zeros(1, 1, 3, dtype=torch.long)
    anchors = Anchors(torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1, dtype=torch.bool))
    return Blocks(anchors, zeros, zeros, zeros, torch.tensor([[list(supervised)]]).bool())
