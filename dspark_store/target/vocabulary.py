"""The vocabulary tables of a target that several ranks hold, gathered on one."""

from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from dspark_store.format.jsonvalue import JsonValue
from dspark_store.target.facts import head_facts, target_weights


@dataclass(frozen=True, slots=True)
class VocabularyWeights:
    """The tables as `target_weights` gives them, whole and on the CPU, and `head_facts`.

    `embedding` and `head` are (V, H), one tensor where the facts say that they are tied; `head_bias` is (V,) or None.
    """

    embedding: Tensor
    head: Tensor
    head_bias: Tensor | None
    facts: dict[str, JsonValue]


def gather_vocabulary(model: PreTrainedModel, *, keep: bool) -> VocabularyWeights | None:
    """Gather the tables of `model` from all ranks that share them; return them where `keep`, else None."""
    facts = head_facts(model)
    embedding, head, bias = target_weights(model)
    whole = _whole(embedding, keep=keep)
    whole_head = whole if facts["tied"] else _whole(head, keep=keep)
    whole_bias = None if bias is None else _whole(bias, keep=keep)
    if whole is None or whole_head is None:
        return None
    return VocabularyWeights(whole, whole_head, whole_bias, facts)


def _whole(weight: Tensor, *, keep: bool) -> Tensor | None:
    whole: Tensor = weight.full_tensor() if isinstance(weight, DTensor) else weight
    return whole.detach().cpu() if keep else None
