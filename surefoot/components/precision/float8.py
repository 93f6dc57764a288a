"""Linear layers with float8 matmuls, by torchao.

Inputs and weights are cast to e4m3, and gradients to e5m2, with one scale for each tensor. Only the
matmuls are in float8. Weights, their gradients and the optimizer state keep their dtypes, so that a
model is saved and loaded like any other. All other operators compute in bf16.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import nn

from surefoot.contract.spec import PrecisionTable
from surefoot.core.errors import SpecError
from surefoot.runtime.lowbit import torchao

MULTIPLE = 16  # the size that a tensor core multiplies at a time


@dataclass(frozen=True)
class Float8Layers:
    """Linear layers of a model that compute in float8.

    `layers` are their names. `skipped` gives the reason for each linear layer that does not compute
    in float8.
    """

    layers: tuple[str, ...]
    skipped: Mapping[str, str]

    @property
    def notes(self) -> list[str]:
        reasons: dict[str, list[str]] = {}
        for name, reason in self.skipped.items():
            reasons.setdefault(reason, []).append(name)
        rest = [
            f"not in float8: {', '.join(names)} ({reason})" for reason, names in reasons.items()
        ]
        return [f"multiplying in float8: {', '.join(self.layers)}", *rest]


def find_linear(model: nn.Module, kept: Collection[nn.Module] = ()) -> Float8Layers:
    """Return the linear layers that `to_float8` converts or has converted, and those it skips.

    The layers inside the modules `kept` are among those that it skips, and stay in fp32.
    """
    wide = {inside for module in kept for inside in module.modules()}
    linear = {
        name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)
    }
    head = list(linear)[-1:]
    why = {
        name: _reason_not_converted(module, name in head, module in wide)
        if name
        else "it is the whole model"
        for name, module in linear.items()
    }
    return Float8Layers(
        tuple(name for name, reason in why.items() if reason is None),
        {name: reason for name, reason in why.items() if reason is not None},
    )


def _reason_not_converted(module: nn.Linear, is_head: bool, is_wide: bool) -> str | None:
    if is_wide:
        return "precision.keep"
    if type(module).__name__ not in ("Linear", "Float8Linear"):
        return f"a {type(module).__name__} may be computed elsewhere"
    if "weight" not in module._parameters:
        return "its weight is not a parameter: something computes it"
    for key in ("in_features", "out_features"):
        if getattr(module, key) % MULTIPLE:
            return f"{key} {getattr(module, key)} is not a multiple of {MULTIPLE}"
    return "the last linear layer: the loss sees what it rounds" if is_head else None


def to_float8(
    model: nn.Module, kept: Collection[nn.Module] = (), *, emulate: bool = False
) -> Float8Layers:
    """Make the linear layers of `model` compute their matmuls in float8, in place.

    Each layer stays the same object, with its hooks, even if the model uses it several times.

    Args:
        model: The model, changed in place.
        kept: Modules whose layers stay in fp32.
        emulate: Round the inputs to float8, but multiply in fp32. On a CPU, this is always done.

    Raises:
        MissingExtra: If torchao is not installed.
        SpecError: If there is no layer to convert.
    """
    found = find_linear(model, kept)
    if not found.layers:
        raise SpecError(
            "precision.compute is 'float8', but no linear layer of the model is: "
            f"{'; '.join(found.notes[1:]) or 'it has none'}",
            hint="use bf16, or sizes that are multiples of 16",
        )
    with torchao('precision.compute = "float8"'):
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    emulates = emulate or next(model.parameters()).device.type == "cpu"
    # the batch is padded to a multiple too
    config = Float8LinearConfig(emulate=emulates, pad_inner_dim=not emulates)
    given = {name: model.get_submodule(name) for name in found.layers}
    convert_to_float8_training(
        model, module_filter_fn=lambda module, name: name in found.layers, config=config
    )
    for name, layer in given.items():
        _convert_in_place(layer, model.get_submodule(name))
        model.set_submodule(name, layer)
    return found


def _convert_in_place(layer: nn.Module, converted: nn.Module) -> None:
    """Give `layer` the class and the new attributes of `converted`; it stays the same object."""
    vars(layer).update(
        {name: value for name, value in vars(converted).items() if name not in vars(layer)}
    )
    layer.__class__ = type(converted)


def convert(model: nn.Module, table: PrecisionTable, kept: Collection[nn.Module] = ()) -> list[str]:
    """Convert the linear layers if `precision.compute` is "float8".

    Returns lines for the log; none for any other format.
    """
    return to_float8(model, kept, emulate=table.emulate).notes if table.compute == "float8" else []
