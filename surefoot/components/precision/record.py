"""Record of the dtypes of each parameter and each operator, observed in one step.

For a parameter, these are the dtypes in which it is stored, computed, reduced and updated.

    record = DtypeRecord(model)
    with record:
        loss(model(batch)).backward()
    record.see_update(optimizer.state.items())
    record.parameters, record.operators

The record uses `torch.utils._python_dispatch.TorchDispatchMode`, which runs below autocast and sees
the real inputs of an operator. A parameter is identified by its storage. A cast or a view of a
parameter counts as that parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.core.errors import NumbersError
from surefoot.runtime.attributes.rewritten import OperatorMode

NAMES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
}
CASTS = ("_to_copy", "to", "copy_")
SCALES = ("mul", "clamp")  # operators before a cast to 8 bits
# operators that move data and compute nothing
MOVES = {
    "detach",
    "alias",
    "clone",
    "t",
    "transpose",
    "permute",
    "expand",
    "view",
    "_unsafe_view",
    "reshape",
    "slice",
    "select",
    "unsqueeze",
    "squeeze",
    "as_strided",
    "split",
    "unbind",
    "cat",
    "stack",
    "empty_like",
    "zeros_like",
    "ones_like",
    "new_zeros",
    "new_empty",
    "fill_",
    "zero_",
    "slice_backward",
    "select_backward",
    "contiguous",
    "_reshape_alias",
    "split_with_sizes",
    "new_empty_strided",
}
# operators that may overflow; others create inf on purpose, as an attention mask
OVERFLOWING = {
    "_to_copy",
    "add",
    "addmm",
    "baddbmm",
    "bmm",
    "convolution",
    "cumsum",
    "div",
    "exp",
    "linalg_vector_norm",
    "mean",
    "mm",
    "mul",
    "norm",
    "pow",
    "prod",
    "reciprocal",
    "rsqrt",
    "square",
    "sub",
    "sum",
    "var",
}
UPDATES = ("_fused_", "_foreach_")  # operators of an update inside the backward pass
PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "convolution", "convolution_backward", "linear")


@dataclass(frozen=True, kw_only=True)
class ParameterDtypes:
    """Dtypes of one parameter; None means that a dtype was not observed.

    `storage` is the dtype of the parameter itself, and `compute` is its dtype as an input of
    operators. `gradient` is the dtype of the gradient from autograd, and `reduce` is the dtype in
    which gradients are summed. `master` is the dtype of the tensor that the optimizer updates, and
    `state` is that of the optimizer state.
    """

    name: str
    numel: int
    storage: str
    compute: str | None = None
    gradient: str | None = None
    reduce: str | None = None
    master: str | None = None
    state: str | None = None


ROLES = ("storage", "compute", "gradient", "reduce", "master", "state")


class DtypeRecord(OperatorMode):
    """Context that records the dtypes of every operator of a forward and backward pass.

    Args:
        model: The model.
        tf32: Report fp32 matmuls as tf32.
        hooked: Observe the dtypes of gradients by hooks. Hooks do not work if the step is compiled
            as one graph; without hooks, `see_update` reads the dtypes.
    """

    def __init__(self, model: nn.Module, *, tf32: bool = False, hooked: bool = True) -> None:
        super().__init__()
        self._tf32 = tf32
        self._named = dict(model.named_parameters())
        self._names = {_key(parameter): name for name, parameter in self._named.items()}
        # outputs of SCALES -> the parameter that was scaled
        self._scaled: dict[tuple[int, torch.dtype], str] = {}
        # casts and scaled weights, kept alive: the address of a freed storage is reused
        self._held: list[Tensor] = []
        # gathered parameters, whose storage the sharding frees and allocates anew
        self._gathered: dict[tuple[int, torch.dtype], Tensor] = {}
        self._computed: dict[str, dict[str, None]] = {}
        self._gradients: dict[str, str] = {}
        self._operators: dict[str, dict[str, None]] = {}
        self._handles = [
            parameter.register_hook(self._gradient_of(name))  # type: ignore[no-untyped-call]
            for name, parameter in self._named.items()
            if hooked and parameter.requires_grad
        ]
        if any(hasattr(parameter, "device_mesh") for parameter in self._named.values()):
            self._handles += [
                module.register_forward_pre_hook(self._make_gather_hook(place))
                for place, module in model.named_modules()
            ]
        self.parameters: tuple[ParameterDtypes, ...] = ()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = str(func.overloadpacket).removeprefix("aten.")
        given = [each for each in _tensors(args) if each.is_floating_point()]
        made = next(_tensors((out,)), None)
        if name in SCALES and made is not None and given and made.numel() == given[0].numel():
            scaled = self._name_of(given[0]) or self._scaled.get(_key(given[0]))
            if scaled is not None:
                self._scaled[_key(made)] = scaled
                self._held.append(made)
        if name in CASTS:
            for each in given[:1]:
                known = self._name_of(each) or (
                    self._scaled.get(_key(each)) if _is_narrow(made) else None
                )
                if made is not None and known is not None and _key(made) != _key(each):
                    self._names[_key(made)] = known
                    self._held.append(made)
        elif name not in MOVES and given and not name.startswith(UPDATES):
            dtype = self._describe_dtypes(name, given)
            self._operators.setdefault(name, {})[dtype] = None
            for each in given:
                if (known := self._name_of(each)) is not None:
                    self._computed.setdefault(known, {})[self._describe_dtypes(name, [each])] = None
        return out

    def _name_of(self, tensor: Tensor) -> str | None:
        """Return the name of the parameter if `tensor` is a parameter, or a cast or view of one.

        Returns None for any other tensor.
        """
        key = _key(tensor)
        gathered = self._gathered.get(key)
        if gathered is not None and _key(gathered) != key:
            # freed since, and something else was allocated there
            del self._gathered[key], self._names[key]
        return self._names.get(key)

    def _describe_dtypes(self, name: str, given: Sequence[Tensor]) -> str:
        """Return the dtypes of an operator's inputs as text."""
        found = dict.fromkeys(
            NAMES.get(each.dtype, str(each.dtype).removeprefix("torch.")) for each in given
        )
        if self._tf32 and name in PRODUCTS and tuple(found) == ("fp32",):
            return "tf32"
        return " and ".join(found)

    def _gradient_of(self, name: str) -> Callable[[Tensor], None]:
        def see(gradient: Tensor) -> None:
            self._gradients[name] = NAMES.get(gradient.dtype, str(gradient.dtype))

        return see

    def _make_gather_hook(self, place: str) -> Callable[[nn.Module, Any], None]:
        """Return a forward pre-hook that records the gathered parameters of a sharded module.

        `place` is the name of the module.
        """
        known: set[str] = set()

        def see(module: nn.Module, _: Any) -> None:
            for own, parameter in module.named_parameters(recurse=False):
                name = f"{place}.{own}" if place else own
                if name not in self._named or hasattr(parameter, "device_mesh"):
                    continue
                key = _key(parameter)
                self._names[key], self._gathered[key] = name, parameter
                if parameter.requires_grad and name not in known:
                    known.add(name)
                    register: Any = parameter.register_hook
                    self._handles.append(register(self._gradient_of(name)))

        return see

    def see_update(
        self,
        states: Iterable[tuple[Tensor, Mapping[str, Any]]],
        master_of: Callable[[Tensor], Tensor] = lambda parameter: parameter,
    ) -> None:
        """Record the dtypes that exist after the backward pass, and set `parameters`.

        They are those of the gradients, the masters and the optimizer state. This function must be
        called before the gradients are cleared, and ends the recording.

        Args:
            states: The tensors that the optimizer updates, with their optimizer state.
            master_of: Function that returns the tensor that the optimizer updates for a parameter.
        """
        self.leave()
        kept = {id(moved): state for moved, state in states}
        self.parameters = tuple(
            self._row(name, parameter, master_of(parameter), kept)
            for name, parameter in self._named.items()
        )

    def leave(self) -> None:
        """Stop recording: remove the hooks, and release the recorded tensors."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._held.clear()
        self._gathered.clear()

    def _row(
        self, name: str, parameter: Tensor, master: Tensor, kept: Mapping[int, Mapping[str, Any]]
    ) -> ParameterDtypes:
        state = kept.get(id(master))
        numbers = (
            []
            if state is None
            else [
                _name(each)
                for key, each in state.items()
                if isinstance(each, Tensor) and key != "step"
            ]
        )
        seen = None if parameter.grad is None else _name(parameter.grad)
        return ParameterDtypes(
            name=name,
            numel=parameter.numel(),
            storage=_name(parameter),
            compute=_join(self._computed.get(name)),
            gradient=self._gradients.get(name, seen),
            reduce=None if master.grad is None else _name(master.grad),
            master=None if state is None else _name(master),
            state=_join(numbers),
        )

    @property
    def operators(self) -> dict[str, str]:
        """Dtypes of each operator's inputs, by the name of the operator."""
        return {name: ", ".join(found) for name, found in sorted(self._operators.items())}


class OverflowRecord(OperatorMode):
    """Context that finds the first operator with finite inputs and a non-finite 16-bit output.

    `where` returns the name of the running module. An overflow may be visible only in the
    operators: a norm whose squares overflow returns zeros, without an error.
    """

    def __init__(self, where: Callable[[], str]) -> None:
        super().__init__()
        self._where = where
        # operator, module, output, inputs
        self.found: tuple[str, str, Tensor, list[Tensor]] | None = None

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = str(func.overloadpacket).removeprefix("aten.")
        if self.found is None and name in OVERFLOWING:
            made = [
                each
                for each in _tensors((out,))
                if each.is_floating_point() and each.element_size() == 2
            ]
            given = [each for each in _tensors(args) if each.is_floating_point()]
            if not all(map(_is_finite, made)) and all(map(_is_finite, given)):
                self.found = (
                    name,
                    self._where(),
                    next(each for each in made if not _is_finite(each)),
                    given,
                )
        return out


def _is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


def check_contract(contract: Mapping[Any, str], parameters: Iterable[ParameterDtypes]) -> None:
    """Raise NumbersError if the dtypes of a parameter are not those that `contract` requires.

    `contract` maps roles, such as "gradient", to dtypes. A dtype that was not observed is not
    checked, nor is a parameter that no optimizer updates.
    """
    for row in parameters:
        for role, wanted in contract.items():
            found = getattr(row, role)
            if found is not None and found != wanted and row.master is not None:
                raise NumbersError(
                    f"precision.contract says {role} = {wanted!r}, "
                    f"and that of {row.name} is {found}, as observed in step 1",
                    hint=(
                        "surefoot explain SPEC shows every parameter; change the spec, "
                        "or the contract"
                    ),
                )


def group(parameters: Iterable[ParameterDtypes]) -> list[dict[str, Any]]:
    """Group the parameters whose dtypes are equal in every role.

    Returns a dict for each group, with the names of its parameters, their total number of elements,
    and their dtype in each role.
    """
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for each in parameters:
        values = asdict(each)
        key = tuple(values[role] for role in ROLES)
        row = rows.setdefault(
            key, {"names": [], "num_numbers": 0, **{role: values[role] for role in ROLES}}
        )
        row["names"].append(each.name)
        row["num_numbers"] += each.numel
    return list(rows.values())


def _key(tensor: Tensor) -> tuple[int, torch.dtype]:
    """Return a key that is equal for tensors with the same storage and dtype.

    The key of a tensor without an address, such as an empty or a nested tensor, is unique.
    """
    try:
        return tensor.untyped_storage().data_ptr() or -id(tensor), tensor.dtype
    except RuntimeError:
        return -id(tensor), tensor.dtype


def _name(tensor: Tensor) -> str:
    return NAMES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))


def _join(names: Iterable[str] | None) -> str | None:
    return ", ".join(dict.fromkeys(names)) or None if names is not None else None


def _is_narrow(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.is_floating_point() and tensor.element_size() == 1


def _tensors(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists and tuples.

    For a tensor subclass that consists of several tensors, such as an 8-bit tensor with its scale,
    the first inner tensor is yielded.
    """
    if hasattr(type(tree), "__tensor_flatten__"):
        yield getattr(tree, tree.__tensor_flatten__()[0][0])
    elif isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, list | tuple):
        for each in tree:
            yield from _tensors(each)
