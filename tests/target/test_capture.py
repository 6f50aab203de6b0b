from typing import Any

import pytest
import torch
from torch import nn

from dspark_store.target.capture import TargetCapture
from tests.tiny import VOCAB_SIZE, tiny_deepseek_v4, tiny_gemma, tiny_gpt2, tiny_llama, tiny_qwen3, tiny_qwen3_moe

FAMILIES = [tiny_llama, tiny_qwen3, tiny_qwen3_moe, tiny_gemma, tiny_deepseek_v4, tiny_gpt2]


def batch(size=2, length=13, padding=4):
    """Ids and a mask whose last row ends in padding."""
    ids = torch.randint(0, VOCAB_SIZE, (size, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if padding:
        mask[-1, -padding:] = 0
    return ids, mask


def hidden_states(model, ids, mask):
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=mask, output_hidden_states=True, use_cache=False).hidden_states


def hook_count(model):
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


@pytest.mark.parametrize("build", FAMILIES)
def test_capture_equals_output_hidden_states_at_every_id(build):
    model = build()
    ids, mask = batch()
    captured = TargetCapture(model, [-1, 0, 1, 2, 3])(ids, mask)
    expected = hidden_states(model, ids, mask)
    for state, other in zip(captured.layers, expected, strict=True):
        assert torch.equal(state, other.mean(dim=2) if other.dim() == 4 else other)
    assert torch.equal(captured.last, expected[-1])


def test_the_last_layer_is_the_same_tensor_as_last():
    captured = TargetCapture(tiny_llama(), [1, 3])(*batch())
    assert captured.layers[1] is captured.last


def test_captured_states_are_ordinary_tensors_without_gradient():
    captured = TargetCapture(tiny_llama(), [0, 3])(*batch())
    for state in (*captured.layers, captured.last):
        assert not state.requires_grad
        assert not state.is_inference()
        assert state.to(torch.bfloat16).float().numpy().shape == (2, 13, 32)


def test_the_head_is_never_run():
    model = tiny_llama()
    model.lm_head.register_forward_hook(lambda *_: pytest.fail("the head ran"))
    TargetCapture(model, [1])(*batch())


def test_a_model_in_training_mode_is_put_in_eval_mode():
    model = tiny_gpt2().train()
    ids, mask = batch()
    capture = TargetCapture(model, [0, 1])
    assert torch.equal(capture(ids, mask).last, capture(ids, mask).last)


def test_hooks_are_gone_after_a_forward():
    model = tiny_llama()
    before = hook_count(model)
    TargetCapture(model, [-1, 0, 3])(*batch())
    assert hook_count(model) == before


def test_hooks_are_gone_after_a_forward_that_raises():
    model = tiny_llama()
    ids, mask = batch()
    before = hook_count(model)
    with pytest.raises(IndexError):
        TargetCapture(model, [-1, 0, 3])(ids + VOCAB_SIZE, mask)
    assert hook_count(model) == before


def test_hooks_are_gone_when_one_cannot_be_registered(monkeypatch):
    model = tiny_llama()
    before = hook_count(model)

    def refuse(*_, **__):
        raise MemoryError

    monkeypatch.setattr(model.model.norm, "register_forward_hook", refuse)
    with pytest.raises(MemoryError):
        TargetCapture(model, [-1, 0, 3])(*batch())
    assert hook_count(model) == before


class Layer(nn.Module):
    def forward(self, hidden_states):
        return hidden_states + 1, "weights"


class Stack(nn.Module):
    """A base model of three layers that records what it is called with."""

    def __init__(self, layers=None):
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.layers = nn.ModuleList([Layer() for _ in range(3)]) if layers is None else layers
        self.norm = nn.LayerNorm(4)
        self.called_with: dict[str, Any] = {}

    def run(self, input_ids, skipped=()):
        state = self.embed(input_ids)
        layers = self.layers.values() if isinstance(self.layers, nn.ModuleDict) else self.layers
        for index, layer in enumerate(layers):
            if index not in skipped:
                state, _ = layer(hidden_states=state)
        return state


class Open(Stack):
    def forward(self, input_ids, **kwargs):
        self.called_with = {"input_ids": input_ids, **kwargs}
        return self.norm(self.run(input_ids))


class Narrow(Stack):
    def forward(self, input_ids):
        return self.norm(self.run(input_ids))


class WithoutNorm(Stack):
    def forward(self, input_ids):
        return self.run(input_ids)


class SkipsLayerOne(Stack):
    def forward(self, input_ids):
        return self.norm(self.run(input_ids, skipped=[1]))


class Wrapped(nn.Module):
    """A multimodal layout: the language model lies two levels down, beside another tower with layers."""

    def __init__(self):
        super().__init__()
        self.model = nn.Module()
        self.model.vision_tower = Open()
        self.model.language_model = Open()


def test_the_forward_gets_ids_mask_and_use_cache_and_nothing_else():
    stack = Open()
    ids, mask = torch.tensor([[1, 2]]), torch.tensor([[1, 1]])
    TargetCapture(stack, [0])(ids, mask)
    assert stack.called_with == {"input_ids": ids, "attention_mask": mask, "use_cache": False}


def test_keywords_that_the_forward_does_not_declare_are_dropped():
    captured = TargetCapture(Narrow(), [0])(torch.tensor([[1, 2]]), torch.tensor([[1, 1]]))
    assert captured.last.shape == (1, 2, 4)


def test_tuple_outputs_and_keyword_inputs_are_captured():
    stack = Narrow()
    ids = torch.tensor([[1, 2]])
    states = TargetCapture(stack, [-1, 0, 1])(ids, torch.ones_like(ids)).layers
    expected = stack.embed(ids)
    for state in states:
        assert torch.equal(state, expected)
        expected = expected + 1


def test_layers_in_a_dict_are_taken_in_the_order_of_their_numbers():
    numbers = [str(index) for index in range(12)]
    layers = nn.ModuleDict({number: Layer() for number in sorted(numbers)})
    capture = TargetCapture(Stack(layers), [0])
    assert capture.num_layers == 12
    assert [id(layer) for layer in capture._layers] == [id(layers[number]) for number in numbers]


def test_the_language_model_of_a_multimodal_layout_is_found():
    model = Wrapped()
    ids = torch.tensor([[1, 2]])
    TargetCapture(model, [0])(ids, ids)
    language_model = model.model.language_model
    assert isinstance(language_model, Open)
    assert language_model.called_with["input_ids"] is ids


@pytest.mark.parametrize(("stack", "layer", "name"), [(WithoutNorm, 0, "final norm"), (SkipsLayerOne, 1, "layer 1")])
def test_a_forward_that_skips_the_final_norm_or_a_captured_layer_is_an_error(stack, layer, name):
    ids = torch.tensor([[1]])
    with pytest.raises(RuntimeError, match=f"no output of the {name}"):
        TargetCapture(stack(), [layer])(ids, ids)


def test_a_model_without_layers_is_refused_before_any_forward():
    with pytest.raises(ValueError, match="cannot capture Linear: no module with decoder layers"):
        TargetCapture(nn.Linear(2, 2), [0])


def test_a_model_without_final_norm_is_refused_before_any_forward():
    stack = Stack()
    del stack.norm
    with pytest.raises(ValueError, match="cannot capture Stack: it has no final norm"):
        TargetCapture(stack, [0])


@pytest.mark.parametrize("ids", [[], [4], [1, 0]])
def test_layer_ids_that_do_not_fit_the_model_are_refused_before_any_forward(ids):
    with pytest.raises(ValueError, match=r"layer ids .*\[0, 3\]"):
        TargetCapture(tiny_llama(), ids)
