"""Linear layers that multiply in float8, by torchao: what comes in and the weight as e4m3, what flows back as e5m2, with a scale each.

Only the products are in float8. Weights, their gradients and the optimiser's state stay what they are, so a model is saved, loaded and
taken over as any other. All else computes in bf16.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import nn

from surefoot.contract.spec import PrecisionTable
from surefoot.core.errors import SpecError
from surefoot.runtime.lowbit import torchao

MULTIPLE = 16  # what a tensor core takes at a time


@dataclass(frozen=True)
class Converted:
    """The linear layers of a model that multiply in float8, and why each other one does not."""

    layers: tuple[str, ...]
    skipped: Mapping[str, str]

    @property
    def notes(self) -> list[str]:
        reasons: dict[str, list[str]] = {}
        for name, reason in self.skipped.items():
            reasons.setdefault(reason, []).append(name)
        rest = [f"not in float8: {', '.join(names)} ({reason})" for reason, names in reasons.items()]
        return [f"multiplying in float8: {', '.join(self.layers)}", *rest]


def find_linear(model: nn.Module, kept: Collection[nn.Module] = ()) -> Converted:
    """What `to_float8` makes, or has made, of each linear layer of `model`; what stands in the modules `kept` computes in fp32."""
    wide = {inside for module in kept for inside in module.modules()}
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    head = list(linear)[-1:]
    why = {
        name: _why_not(module, name in head, module in wide) if name else "it is the whole model"
        for name, module in linear.items()
    }
    return Converted(
        tuple(name for name, reason in why.items() if reason is None),
        {name: reason for name, reason in why.items() if reason is not None},
    )


def _why_not(module: nn.Linear, is_head: bool, is_wide: bool) -> str | None:
    if is_wide:
        return "precision.keep"
    if type(module).__name__ not in ("Linear", "Float8Linear"):
        return f"a {type(module).__name__} may be computed elsewhere"
    if "weight" not in module._parameters:
        return "its weight is no parameter: something computes it"
    for key in ("in_features", "out_features"):
        if getattr(module, key) % MULTIPLE:
            return f"{key} {getattr(module, key)} is not a multiple of {MULTIPLE}"
    return "the last linear layer: the loss sees what it rounds" if is_head else None


def to_float8(model: nn.Module, kept: Collection[nn.Module] = (), *, emulate: bool = False) -> Converted:
    """Let the linear layers of `model` multiply in float8; emulated, as on any CPU, they are rounded to it and multiplied in fp32.

    Each stays the object that it is, with its hooks and wherever else it stands. Raises MissingExtra without torchao, SpecError
    where there is no layer to convert.
    """
    found = find_linear(model, kept)
    if not found.layers:
        raise SpecError(
            f"precision.compute is 'float8', and no linear layer of the model is: {'; '.join(found.notes[1:]) or 'it has none'}",
            hint="use bf16, or sizes that are multiples of 16",
        )
    with torchao('precision.compute = "float8"'):
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    emulates = emulate or next(model.parameters()).device.type == "cpu"
    config = Float8LinearConfig(emulate=emulates, pad_inner_dim=not emulates)  # rows of a batch are padded to a multiple, too
    given = {name: model.get_submodule(name) for name in found.layers}
    convert_to_float8_training(model, module_filter_fn=lambda module, name: name in found.layers, config=config)
    for name, layer in given.items():
        _become(layer, model.get_submodule(name))
        model.set_submodule(name, layer)
    return found


def _become(layer: nn.Module, converted: nn.Module) -> None:
    """Let a layer multiply as the one that was made of it, and be to all others what it was."""
    vars(layer).update({name: value for name, value in vars(converted).items() if name not in vars(layer)})
    layer.__class__ = type(converted)


def convert(model: nn.Module, table: PrecisionTable, kept: Collection[nn.Module] = ()) -> list[str]:
    """Put into place what [precision] has of other layers; gives notes."""
    return to_float8(model, kept, emulate=table.emulate).notes if table.compute == "float8" else []
