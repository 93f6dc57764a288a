"""State of a module for a checkpoint, including the state that its state dict omits.

A state dict may contain more than the tensors of the module: the results of `get_extra_state` and
of state dict hooks. It may also contain less: non-persistent buffers are missing, although training
depends on them.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from surefoot.components.checkpoint.tensor_files import DTYPES, check_storable, create, fill
from surefoot.components.checkpoint.tree import split
from surefoot.contract.manifest import Piece
from surefoot.contract.state import Part
from surefoot.core.errors import RunFolderError, TaskError
from surefoot.runtime.attributes.snapshot import ABSENT
from surefoot.runtime.attributes.stored import Stored, encode_attributes
from surefoot.runtime.attributes.tracker import AttributeChanges
from surefoot.runtime.attributes.values import find_owner


class ModuleTensors(NamedTuple):
    """State of a module for a checkpoint.

    `tensors` are its parameters and buffers, not copied, by their names in the state dict. `extra`
    are the other entries of the state dict. `buffers` are the buffers that the state dict omits.
    """

    tensors: dict[str, Tensor]
    extra: dict[str, Any]
    buffers: dict[str, Tensor]


def module_state(module: nn.Module, stored: Collection[str] | None = None) -> ModuleTensors:
    """Return the state of a module for a checkpoint.

    A custom `state_dict` may return a changed copy of a parameter, such as a cast; the parameter
    itself is returned instead. A custom `state_dict` may also omit parameters. Those that require
    gradients are returned all the same. When a checkpoint is loaded, those whose names are in
    `stored` are returned instead.

    Args:
        module: The module.
        stored: Names of the tensors in the checkpoint to load; None when a checkpoint is saved.

    Raises:
        TaskError: For a lazy layer whose parameters have no shape yet.
    """
    for name, each in chain(module.named_parameters(), module.named_buffers()):
        check_shaped(name, each)
    own = [*module.parameters(), *module.buffers()]
    known = {id(each) for each in own}
    places: set[tuple[Any, ...]] | None = None
    state = module.state_dict(keep_vars=True)
    tensors, extra = dict[str, Tensor](), dict[str, Any]()
    live = (
        {}
        if _is_flattened(module)
        else {**dict(module.named_parameters()), **dict(module.named_buffers())}
    )
    for name, value in state.items():
        is_own = id(value) in known
        if isinstance(value, Tensor) and not is_own:  # a state dict hook may have detached it
            places = {_memory_key(each) for each in own} if places is None else places
            is_own = _memory_key(value) in places
            if not is_own and name in live:
                value, is_own = live[name], True
        (tensors if is_own else extra)[name] = value
    saved = {id(each) for each in tensors.values()}
    left = {
        name: each
        for name, each in live.items()
        if isinstance(each, nn.Parameter) and id(each) not in saved
    }
    left = {
        name: each
        for name, each in left.items()
        if (each.requires_grad if stored is None else name in stored)
    }
    saved_places = {_memory_key(each) for each in tensors.values()} if left else set()
    tensors |= {
        name: each
        for name, each in left.items()
        if name not in state and _memory_key(each) not in saved_places
    }
    return ModuleTensors(
        tensors,
        extra,
        {name: buffer for name, buffer in module.named_buffers() if name not in state},
    )


def _is_flattened(module: nn.Module) -> bool:
    """Return whether FSDP1 has flattened the parameters of a module.

    The state dict of such a module contains the original parameters, assembled from the flat ones.
    """
    kind = _class_if_imported("torch.distributed.fsdp", "FullyShardedDataParallel")
    return any(isinstance(each, kind) for each in module.modules())


def check_shaped(name: str, tensor: Tensor) -> None:
    """Raise TaskError if `tensor` belongs to a lazy layer that has not processed a batch yet."""
    if is_lazy(tensor):
        raise TaskError(
            f"{name} has no shape yet: its module is lazy",
            hint="run one batch through the model first",
        )


def _memory_key(tensor: Tensor) -> tuple[Any, ...]:
    """Return a key that is equal for tensors with the same memory, shape, strides and dtype.

    The key of a sparse or nested tensor is its `id`.
    """
    if tensor.layout is not torch.strided or tensor.is_nested:
        return (id(tensor),)
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def check_buffers(module: nn.Module, names: Iterable[str]) -> None:
    """Raise RunFolderError if `put_back_buffers` could not restore one of the buffers `names`.

    That is the case if the module of the buffer does not exist, or if the name of the buffer
    belongs to a different attribute.
    """
    for name in names:
        above, _, leaf = name.rpartition(".")
        try:
            owner = module.get_submodule(above)
        except AttributeError:
            owner = None
        if owner is None or (leaf not in owner._buffers and hasattr(owner, leaf)):
            raise RunFolderError(
                f"the checkpoint contains the buffer {name!r}, but the model has no such module",
                hint="resume with the model that was saved",
            )


def _has_form(held: Any, piece: Piece) -> bool:
    return (
        isinstance(held, Tensor)
        and tuple(held.shape) == piece.shape
        and DTYPES.get(held.dtype) == piece.dtype
    )


def match_buffers(
    module: nn.Module, pieces: Mapping[str, Piece], forms: Mapping[str, bool]
) -> Callable[[], None]:
    """Change the buffers of a module to the shapes and dtypes that they have in a checkpoint.

    Only buffers that are None, and buffers in `forms`, are changed.

    Args:
        module: The module, changed in place.
        pieces: Shape and dtype of the stored tensors, by name. A buffer that is None becomes such a
            tensor.
        forms: Buffers that a forward pass had replaced or registered when the checkpoint was saved.
            True means that the checkpoint has a tensor for the buffer, and that the buffer gets its
            shape and dtype. False means that the buffer was None, and is set to None.

    Returns:
        A function that undoes the changes.
    """
    before = list[tuple[nn.Module, str, Any]]()
    near = next((each.device for each in module.parameters()), torch.device("cpu"))
    wanted = {name: piece for name, piece in pieces.items() if forms.get(name, True)}
    for name, piece in [*wanted.items(), *((each, None) for each, is_set in forms.items())]:
        owner, leaf = find_owner(module, name)
        if owner is None or (leaf not in owner._buffers and hasattr(owner, leaf)):
            continue
        held = owner._buffers.get(leaf, ABSENT)
        if piece is None:
            if forms[name] or held is None or held is ABSENT:
                continue
        elif not (held is None or name in forms) or _has_form(held, piece):
            continue
        before.append((owner, leaf, held))
        owner._buffers[leaf] = None if piece is None else create(name, piece).to(near)

    def undo() -> None:
        for owner, leaf, held in before:
            if held is ABSENT:
                del owner._buffers[leaf]
            else:
                owner._buffers[leaf] = held

    return undo


@torch.no_grad()
def put_back_buffers(
    module: nn.Module, saved: Mapping[str, Tensor], *, keep_others: bool = False
) -> None:
    """Restore the saved non-persistent buffers of a module.

    A saved tensor is copied into the buffer of the same name. If the module has no such buffer yet,
    because only the forward pass creates it, the buffer is registered.

    Args:
        module: The module, changed in place.
        saved: The saved tensors, by buffer name.
        keep_others: If a buffer has a different shape than the saved tensor, keep it; if only the
            dtype is different, cast the saved tensor. By default, such a buffer is replaced.
    """
    for name, value in saved.items():
        above, _, leaf = name.rpartition(".")
        owner = module.get_submodule(above)
        held = owner._buffers.get(leaf)
        near = held if held is not None else next(module.parameters(), value)
        if (
            held is not None
            and held.shape == value.shape
            and (keep_others or held.dtype == value.dtype)
        ):
            fill(name, held, value)
        elif leaf not in owner._buffers:
            owner.register_buffer(leaf, value.to(near.device), persistent=False)
        elif held is None or not keep_others:
            owner._buffers[leaf] = value.to(near.device)


def encode_storable(module: nn.Module, changed: AttributeChanges) -> tuple[Stored, tuple[str, ...]]:
    """Encode the changed attributes of a module that a checkpoint can store.

    Returns the encoded attributes, for `put_back_attributes`, and the names and types of the
    attributes that cannot be stored.
    """
    values, unsaved = {}, list(changed.unsaved)
    for name, value in changed.values.items():
        try:
            for place, tensor in split(value, name)[1].items():
                check_storable(place, tensor)
        except TaskError:
            unsaved.append(f"{name} ({type(value).__name__})")
        else:
            values[name] = value
    return encode_attributes(module, replace(changed, values=values)), tuple(unsaved)


def put_back_extra(module: nn.Module, extra: Mapping[str, Any]) -> None:
    """Load the entries of a saved state dict that are not tensors of the module.

    Parameters and buffers keep their values.
    """
    if extra:
        module.load_state_dict({**module.state_dict(), **extra}, strict=False)


# ---- DTensors, as FSDP2 makes them: each rank holds a shard


class LocalShard(NamedTuple):
    """Shard of a DTensor on this rank, which stands for the DTensor in a saved state.

    `layout` is the index of its mesh and placements in the list that `find_layouts` returns.
    `shape` and `stride` are those of the whole DTensor.
    """

    layout: int
    tensor: Tensor
    shape: list[int]
    stride: list[int]


Layouts = list[tuple[Any, tuple[Any, ...]]]  # device meshes, each with placements


class _Nobody:
    def publish(self) -> None: ...


def _class_if_imported(module: str, name: str) -> Any:
    """Return a class of torch if its module has been imported, else an empty tuple.

    Without the import, no object of the class can exist, and `isinstance(value, ())` is False.
    """
    return getattr(sys.modules.get(module), name, ())


def _is_sharded(value: Any) -> bool:
    return isinstance(value, _class_if_imported("torch.distributed.tensor", "DTensor"))


def reshard(modules: Iterable[nn.Module]) -> None:
    """Release the weights that FSDP2 has gathered, so that the parameters are shards again.

    A forward pass without a backward pass leaves the weights gathered, but a checkpoint saves the
    shards.
    """
    kind = _class_if_imported("torch.distributed.fsdp", "FSDPModule")
    for module in modules:
        for each in module.modules():
            if isinstance(each, kind):
                each.reshard()


def find_layouts(modules: Iterable[nn.Module]) -> Layouts:
    """Return the distinct layouts of the DTensor parameters of `modules`, as (mesh, placements).

    For each mesh, the list also contains the layout that is replicated on every rank.
    """
    parameters = [each for module in modules for each in module.parameters() if _is_sharded(each)]
    if not parameters:
        return []
    from torch.distributed.tensor import Replicate

    found: Layouts = []
    for each in parameters:
        mesh: Any = each.device_mesh  # type: ignore[attr-defined]
        placements: Any = each.placements  # type: ignore[attr-defined]
        for layout in ((mesh, tuple(placements)), (mesh, (Replicate(),) * mesh.ndim)):
            if layout not in found:
                found.append(layout)
    return found


def describe_layouts(layouts: Layouts) -> list[str]:
    """Return a description of each layout, which can be compared with those in a checkpoint."""
    return [
        f"{', '.join(map(str, placements))} on {' x '.join(map(str, mesh.shape))} ranks"
        for mesh, placements in layouts
    ]


@torch.no_grad()
def with_local_rows(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return `tensors` with each DTensor replaced by the shard of this rank.

    Attributes of a shard say how to save it. A shard along dimension 0 records its rows in the
    whole tensor (see `part_of`). If several ranks have the same rows, `is_copy` is False on one of
    them, and True on the others. Any other shard has `is_own = True`.
    """
    local = {id(each): _local_rows(each) for each in tensors.values() if _is_sharded(each)}
    return {name: local.get(id(each), each) for name, each in tensors.items()}


def _local_rows(tensor: Any) -> Tensor:
    from torch.distributed.tensor import Replicate, Shard

    held: Any = tensor.to_local().detach()
    mesh = tensor.device_mesh
    cut = [
        axis
        for axis, each in enumerate(tensor.placements)
        if type(each) is not Replicate and mesh.size(axis) > 1
    ]
    if (
        len(cut) == 1
        and type(tensor.placements[cut[0]]) is Shard
        and tensor.placements[cut[0]].dim == 0
    ):
        most = -(-len(tensor) // mesh.size(cut[0]))  # the sizes that torch.chunk gives
        held.part = Part(
            min(len(tensor), mesh.get_local_rank(cut[0]) * most), tuple(tensor.shape), _Nobody()
        )
        held.is_copy = any(
            mesh.get_local_rank(axis) for axis in range(mesh.ndim) if axis not in cut
        )
    elif cut:
        held.is_own = True
    return held  # type: ignore[no-any-return]


def to_local_shards(tree: Any, layouts: Layouts) -> Any:
    """Return the nested state `tree` with each DTensor replaced by a LocalShard.

    Raises TaskError for a DTensor whose mesh and placements are not in `layouts`.
    """

    def convert(value: Any) -> Any:
        if not _is_sharded(value):
            return value
        layout = (value.device_mesh, tuple(value.placements))
        if layout not in layouts:
            raise TaskError(
                (
                    f"a tensor of the state is distributed over ranks as {layout[1]}, unlike "
                    "every parameter of the model"
                ),
                hint=(
                    "distribute it as the parameters are, or keep a plain tensor: "
                    "tensor.full_tensor()"
                ),
            )
        return LocalShard(
            layouts.index(layout),
            value.to_local().detach(),
            list(value.shape),
            list(value.stride()),
        )

    return _convert(tree, convert) if layouts else tree


def to_dtensors(tree: Any, layouts: Layouts) -> Any:
    """Return the nested state `tree` with each LocalShard replaced by a DTensor."""
    if not layouts:
        return tree
    from torch.distributed.tensor import DTensor

    def convert(value: Any) -> Any:
        if not isinstance(value, LocalShard):
            return value
        mesh, placements = layouts[value.layout]
        return DTensor.from_local(
            value.tensor,
            mesh,
            placements,
            run_check=False,
            shape=torch.Size(value.shape),
            stride=tuple(value.stride),
        )

    return _convert(tree, convert)


def _convert(tree: Any, convert: Callable[[Any], Any]) -> Any:
    """Return `tree` with `convert` applied to every value in nested dicts, lists and tuples.

    A container of a different type is passed to `convert` as one value.
    """
    made = convert(tree)
    if made is not tree:
        return made
    if type(tree) in (dict, OrderedDict):
        return type(tree)((key, _convert(value, convert)) for key, value in tree.items())
    if type(tree) in (list, tuple):
        return type(tree)(_convert(value, convert) for value in tree)
    return tree
