"""The parallel plans that transformers keeps with a model: which of its parts are shared out, and how."""

import re

from torch import nn

_LAYER_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def rules_by_name(base: nn.Module, plan: dict[str, str]) -> dict[str, str]:
    """Name each module and parameter of `base` that `plan` has a rule for, with the rule's style.

    A plan writes "*" for the number of a layer. A rule for a module holds for its own parameters too. A module's
    parameters come before the module itself, which is the order in which transformers applies them.
    """
    rules: dict[str, str] = {}
    for name, module in base.named_modules():
        of_module = plan.get(_any_layer(name))
        for parameter, _ in module.named_parameters(recurse=False):
            full_name = f"{name}.{parameter}" if name else parameter
            style = plan.get(_any_layer(full_name), of_module)
            if style is not None:
                rules[full_name] = style
        if of_module is not None:
            rules[name] = of_module
    return rules


def _any_layer(name: str) -> str:
    return _LAYER_NUMBER.sub("*", name)
