"""Parameter groups: what decays, what has its own rate, what is frozen. Every trained parameter stands in exactly one group."""

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
class Named:
    """One trained parameter, or its master, with what decides its group. `kind`: matrix, embedding, head, norm or vector.

    `others` are the further names of a tied parameter: a pattern may mean it by any of them. The gradient of one that `is_sparse` is.
    """

    name: str
    parameter: Tensor
    kind: str
    others: tuple[str, ...] = ()
    is_sparse: bool = False

    def matches(self, *patterns: str) -> bool:
        return any(fnmatchcase(name, pattern) for name in (self.name, *self.others) for pattern in patterns)


def check_shaped(model: nn.Module) -> None:
    """Raise TaskError for a parameter or buffer that has no shape before the first forward pass, as those of nn.LazyLinear."""
    lazy = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if is_lazy(tensor)]
    if lazy:
        raise TaskError(
            f"{', '.join(lazy[:3])}{' ...' if len(lazy) > 3 else ''} of the model has no shape yet: the module is lazy",
            hint="give its sizes, or call the model on one batch at the end of model()",
        )


def freeze(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Stop training every parameter whose name matches a pattern (shell style, `blocks.0.*`); gives their names.

    Raises SpecError for a pattern that matches nothing.
    """
    named = dict(model.named_parameters())
    every = [Named(name, named[name], "", others) for name, others in _names_of(model).items()]
    _refuse_idle(patterns, every, "freeze")
    frozen = [each for each in every if each.matches(*patterns)]
    for each in frozen:
        each.parameter.requires_grad_(False)
    return [each.name for each in frozen]


def _names_of(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """The first name of each parameter, with the others of one that is tied."""
    found: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), []).append(name)
    return {first: tuple(others) for first, *others in found.values()}


def find_trained(model: nn.Module) -> list[Named]:
    """Every parameter that takes a gradient, tied ones once, with its kind. Raises TaskError for one that is expanded."""
    kinds: dict[int, str] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and any(
            size > 1 and step == 0 for size, step in zip(parameter.shape, parameter.stride(), strict=True)
        ):
            raise TaskError(
                f"the parameter {name} is expanded: several of its elements are one number in memory, and no optimizer can move them",
                hint="give each element its own memory: nn.Parameter(x.clone())",
            )
    head: nn.Module | None = None
    for module in model.modules():
        if isinstance(module, nn.Linear):
            head = module
        for parameter in _own(module):
            kind = _kind(module, parameter)
            if kinds.get(id(parameter)) not in ("embedding", "norm"):  # a tied head counts as the embedding
                kinds[id(parameter)] = kind
    for parameter in _own(head) if head is not None else ():
        if kinds[id(parameter)] == "matrix":
            kinds[id(parameter)] = "head"
    others, sparse = _names_of(model), {id(each) for each in find_sparse(model)}
    return [
        Named(name, master_of(p), kinds[id(p)], others[name], id(p) in sparse)
        for name, p in model.named_parameters()
        if p.requires_grad
    ]


def find_sparse(model: nn.Module) -> list[nn.Parameter]:
    """The trained weights of embeddings that are built with sparse=True."""
    tables = [each for each in model.modules() if isinstance(each, nn.Embedding | nn.EmbeddingBag) and each.sparse]
    return [weight for each in tables for weight in _own(each) if weight.requires_grad]


def _own(module: nn.Module) -> list[nn.Parameter]:
    """The parameters of a module itself, and those that its parametrizations make them of (weight_norm, orthogonal, ...).

    The attribute that is made is not read: spectral_norm takes a step of its power iteration then.
    """
    made = module.parametrizations.values() if is_parametrized(module) else ()  # type: ignore[operator]
    return [*module.parameters(recurse=False), *(each for part in made for each in part.parameters())]


def _kind(module: nn.Module, parameter: nn.Parameter) -> str:
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return "embedding"
    if "norm" in type(module).__name__.lower():
        return "norm"
    return "vector" if parameter.ndim < 2 else "matrix"


def build_groups(
    trained: Sequence[Named], *, decay: float, no_decay: Sequence[str] = (), rates: Mapping[str, float] | None = None
) -> list[dict[str, Any]]:
    """Groups for a torch optimiser: `params`, `names`, `weight_decay`, and `rate`, the multiplier of the learning rate.

    Norms, biases and embeddings do not decay, nor what `no_decay` matches; the last matching pattern of `rates` wins.
    Raises SpecError for a pattern that matches nothing.
    """
    rates = rates or {}
    _refuse_idle([*no_decay], trained, "no_decay")
    _refuse_idle([*rates], trained, "rates")
    groups: dict[tuple[float, float], dict[str, Any]] = {}
    for each in trained:
        exempt = each.kind in ("norm", "vector", "embedding") or each.matches(*no_decay)
        rate = next((rates[pattern] for pattern in reversed(list(rates)) if each.matches(pattern)), 1.0)
        key = (0.0 if exempt else decay, rate)
        group = groups.setdefault(key, {"params": [], "names": [], "weight_decay": key[0], "rate": rate})
        group["params"].append(each.parameter)
        group["names"].append(each.name)
    return list(groups.values())


def check_cover(model: nn.Module, groups: Iterable[Mapping[str, Any]]) -> None:
    """Raise TaskError when a trained parameter stands in no group or in two."""
    seen: dict[int, int] = {}
    for group in groups:
        for parameter in group["params"]:
            seen[id(parameter)] = seen.get(id(parameter), 0) + 1
    named = [(name, id(master_of(p))) for name, p in model.named_parameters() if p.requires_grad]
    twice = [name for name, key in named if seen.get(key, 0) > 1]
    never = [name for name, key in named if key not in seen]
    if twice:
        raise TaskError(f"parameter {twice[0]} stands in two groups", hint="put each parameter into one group")
    if never:
        raise TaskError(
            f"{len(never)} trained parameters stand in no group, the first is {never[0]}",
            hint="add them to a group, or stop training them with optim.freeze",
        )


def _refuse_idle(patterns: Sequence[str], every: Sequence[Named], key: str) -> None:
    idle = [pattern for pattern in patterns if not any(each.matches(pattern) for each in every)]
    if idle:
        listed = [name for each in every for name in (each.name, *each.others)]
        shown = ", ".join(listed[:8]) + (", ..." if len(listed) > 8 else "")
        raise SpecError(f"optim.{key}: the pattern {idle[0]!r} matches no parameter", hint=f"the parameters are {shown}")
