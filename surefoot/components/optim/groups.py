"""Parameter groups: weight decay, learning-rate multipliers, and frozen parameters.

Every trained parameter is in exactly one group.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from surefoot.contract.state import master_of
from surefoot.core.errors import SpecError, TaskError


@dataclass(frozen=True)
class GroupedParameter:
    """Trained parameter with the properties that decide its parameter group.

    `parameter` is the tensor that the optimizer updates: the fp32 master of a weight in lower
    precision, otherwise the parameter itself. `kind` is matrix, embedding, head, norm or vector.
    `others` are the further names of a tied parameter; a pattern may match any of them. `is_sparse`
    means that its gradient is a sparse tensor.
    """

    name: str
    parameter: Tensor
    kind: str
    others: tuple[str, ...] = ()
    is_sparse: bool = False

    def matches(self, *patterns: str) -> bool:
        return any(
            fnmatchcase(name, pattern) for name in (self.name, *self.others) for pattern in patterns
        )


def check_shaped(model: nn.Module, when: str = "at the end of model()") -> None:
    """Raise TaskError for a parameter or buffer that has no shape yet, as in nn.LazyLinear.

    `when` completes the hint to call the model on one batch.
    """
    lazy = [
        name
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if is_lazy(tensor)
    ]
    if lazy:
        raise TaskError(
            f"{', '.join(lazy[:3])}{' ...' if len(lazy) > 3 else ''} of the model has no shape "
            "yet: the module is lazy",
            hint=f"give its sizes, or call the model on one batch {when}",
        )


def check_has_values(model: nn.Module) -> None:
    """Raise TaskError for a parameter or buffer on the meta device, which has no values."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise TaskError(
                f"{name} is a tensor on the meta device, which has no values to train or save",
                hint='create it on a device: "cpu", "cuda"',
            )


def freeze(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Freeze every parameter whose name matches a pattern, and return the names.

    Patterns are as in fnmatch, for example `blocks.0.*`. Raises SpecError for a pattern that
    matches no parameter.
    """
    named = dict(model.named_parameters())
    every = [
        GroupedParameter(name, named[name], "", others) for name, others in _names_of(model).items()
    ]
    _refuse_idle(patterns, every, "freeze")
    frozen = [each for each in every if each.matches(*patterns)]
    for each in frozen:
        each.parameter.requires_grad_(False)
    return [each.name for each in frozen]


def _names_of(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return a dict from the first name of each parameter to its other names, if it is tied."""
    found: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), []).append(name)
    return {first: tuple(others) for first, *others in found.values()}


def find_trained(model: nn.Module) -> list[GroupedParameter]:
    """Return every parameter that requires a gradient, with its kind; a tied one occurs once.

    Raises:
        TaskError: For an expanded parameter, whose elements share memory.
    """
    kinds: dict[int, str] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and any(
            size > 1 and step == 0
            for size, step in zip(parameter.shape, parameter.stride(), strict=True)
        ):
            raise TaskError(
                (
                    f"the parameter {name} is expanded: several of its elements share memory, "
                    "and an optimizer cannot update them"
                ),
                hint="give each element separate memory: nn.Parameter(x.clone())",
            )
    head: nn.Module | None = None
    for module in model.modules():
        if isinstance(module, nn.Linear):
            head = module
        for parameter in _parameters_of_module(module):
            kind = _kind(module, parameter)
            # a tied head counts as the embedding
            if kinds.get(id(parameter)) not in ("embedding", "norm"):
                kinds[id(parameter)] = kind
    for parameter in _parameters_of_module(head) if head is not None else ():
        if kinds[id(parameter)] == "matrix":
            kinds[id(parameter)] = "head"
    others, sparse = _names_of(model), {id(each) for each in find_sparse(model)}
    return [
        GroupedParameter(name, master_of(p), kinds[id(p)], others[name], id(p) in sparse)
        for name, p in model.named_parameters()
        if p.requires_grad
    ]


def find_sparse(model: nn.Module) -> list[nn.Parameter]:
    """Return the trained weights of embeddings with sparse=True."""
    tables = [
        each
        for each in model.modules()
        if isinstance(each, nn.Embedding | nn.EmbeddingBag) and each.sparse
    ]
    return [
        weight for each in tables for weight in _parameters_of_module(each) if weight.requires_grad
    ]


def _parameters_of_module(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a module, without those of its submodules.

    For a parametrized module (weight_norm, orthogonal, ...), the original parameters are included.
    The parametrized attribute itself is not read, because spectral_norm would then run a step of
    its power iteration.
    """
    parametrizations: Any = module.parametrizations if is_parametrized(module) else {}
    made = parametrizations.values()
    return [
        *module.parameters(recurse=False),
        *(each for part in made for each in part.parameters()),
    ]


def _kind(module: nn.Module, parameter: nn.Parameter) -> str:
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return "embedding"
    if "norm" in type(module).__name__.lower():
        return "norm"
    return "vector" if parameter.ndim < 2 else "matrix"


def build_groups(
    trained: Sequence[GroupedParameter],
    *,
    weight_decay: float,
    no_decay: Sequence[str] = (),
    lr_multipliers: Mapping[str, float] | None = None,
) -> list[dict[str, Any]]:
    """Return parameter groups for a torch optimizer.

    Norms, biases and embeddings have no weight decay.

    Args:
        trained: The parameters, as `find_trained` returns them.
        weight_decay: Weight decay of all other parameters.
        no_decay: Name patterns of further parameters without weight decay.
        lr_multipliers: Learning-rate multipliers by name pattern. If several patterns match a
            parameter, the last one counts.

    Returns:
        Groups with the keys `params`, `names`, `weight_decay` and `rate`, which is the
        learning-rate multiplier.

    Raises:
        SpecError: For a pattern that matches no parameter.
    """
    rates = lr_multipliers or {}
    _refuse_idle([*no_decay], trained, "no_decay")
    _refuse_idle([*rates], trained, "lr_multipliers")
    groups: dict[tuple[float, float], dict[str, Any]] = {}
    for each in trained:
        exempt = each.kind in ("norm", "vector", "embedding") or each.matches(*no_decay)
        rate = next(
            (rates[pattern] for pattern in reversed(list(rates)) if each.matches(pattern)), 1.0
        )
        key = (0.0 if exempt else weight_decay, rate)
        group = groups.setdefault(
            key, {"params": [], "names": [], "weight_decay": key[0], "rate": rate}
        )
        group["params"].append(each.parameter)
        group["names"].append(each.name)
    return list(groups.values())


def check_cover(model: nn.Module, groups: Iterable[Mapping[str, Any]]) -> None:
    """Raise TaskError unless every trained parameter of `model` is in exactly one of `groups`."""
    seen: dict[int, int] = {}
    for group in groups:
        for parameter in group["params"]:
            seen[id(parameter)] = seen.get(id(parameter), 0) + 1
    named = [(name, id(master_of(p))) for name, p in model.named_parameters() if p.requires_grad]
    twice = [name for name, key in named if seen.get(key, 0) > 1]
    never = [name for name, key in named if key not in seen]
    if twice:
        raise TaskError(
            f"parameter {twice[0]} is in two groups", hint="put each parameter into one group"
        )
    if never:
        raise TaskError(
            f"{len(never)} trained parameters are in no group, the first is {never[0]}",
            hint="add them to a group, or stop training them with optim.freeze",
        )


def _refuse_idle(patterns: Sequence[str], every: Sequence[GroupedParameter], key: str) -> None:
    idle = [pattern for pattern in patterns if not any(each.matches(pattern) for each in every)]
    if idle:
        listed = [name for each in every for name in (each.name, *each.others)]
        shown = ", ".join(listed[:8]) + (", ..." if len(listed) > 8 else "")
        raise SpecError(
            f"optim.{key}: the pattern {idle[0]!r} matches no parameter",
            hint=f"the parameters are {shown}",
        )
