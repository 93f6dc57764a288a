"""ZeRO stages 2 and 3: each rank stores some rows of all weights.

It also stores the gradients and the optimizer state of these rows. torch's `fully_shard` (FSDP2)
all-gathers the weights of a unit before its forward pass. In stage 3 it frees them after the
forward pass, and gathers them again before the backward pass; in stage 2 they stay gathered in
between. Gradients are reduce-scattered at the end of a unit's backward pass, in every microbatch,
so that a rank stores only its shard between microbatches. A unit is a block of the model. The
parameters outside of all blocks form one more unit.

https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from surefoot.components.parallel.replicate import Replicas
from surefoot.components.parallel.shard.parts import Named, check_has_rows, serve_part
from surefoot.components.parallel.shard.units import Units
from surefoot.contract.state import master_of
from surefoot.core.errors import SpecError
from surefoot.runtime.comm.group import Group
from surefoot.runtime.comm.mesh import Mesh

Hooks = tuple[Any, Any]


class FullySharded:
    """Sharding of the weights of a model over `mesh.shard` with FSDP2 (ZeRO stages 2 and 3).

    After construction, `master_of(parameter)` returns the rows that this rank stores and updates.

    Args:
        model: The model, changed in place.
        mesh: The ranks.
        units: The modules whose weights are gathered together, by name.
        stage: 2 or 3.
        narrow: Dtype in which weights are gathered; gradients are then summed in fp32. None uses
            the dtype of the weights for both. The rows are always updated in their own dtype.
        wide: Modules whose weights are gathered in their own dtype in spite of `narrow`.
        on_host: Update the rows in host memory, where the optimizer's state is then stored.
        replicated: Parameters that are not sharded and keep their dtype. Every rank updates all of
            them, and their gradients are summed over `mesh.whole` as in `Replicas`.

    Raises:
        SpecError: For a model or a parameter that cannot be sharded, and for a parameter in
            `replicated` that the model does not have.
    """

    is_even = True  # whether all ranks must run the same number of passes
    splits_weights = True
    first_weights = ""  # a digest of the initial weights of a rank

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        units: Mapping[str, nn.Module],
        *,
        stage: int,
        narrow: torch.dtype | None = None,
        wide: Collection[nn.Module] = (),
        on_host: bool = False,
        replicated: Collection[Tensor] = (),
    ) -> None:
        from torch.distributed.fsdp import FSDPModule

        whole = _find_whole(model, replicated)
        split = [(name, each) for name, each in model.named_parameters() if id(each) not in whole]
        check_has_rows(split)
        _check_gathered(split)
        _check_apart(model, units, whole)
        if isinstance(model, nn.ModuleDict | nn.ModuleList):
            kind = type(model).__name__
            raise SpecError(
                "stages 2 and 3 gather weights where a module is called, "
                f"but the task calls parts of a {kind}",
                hint="give a model with a forward of its own, or set layout.zero_stage = 1",
            )
        self._stage, self._whole = stage, whole
        self.group, self.replicas, self._all = mesh.shard, mesh.replicate, mesh.whole
        hooks = _hooks_of(split)
        apart = [each for each in wide if narrow and any(True for _ in each.parameters())]
        _shard((*apart, *units.values(), model), mesh.shard, whole, narrow, apart)
        held_here = [each for each in model.parameters() if id(each) not in whole]
        self._moved = held_here if on_host else []
        self._modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._units = Units(model, self._modules)
        self._gathered = _GatheredParameters(model, hooks, whole)
        self._set_collectives()
        with torch.no_grad():
            for parameter in held_here:
                held: Tensor = parameter.to_local()  # type: ignore[attr-defined]
                most = -(-len(parameter) // mesh.shard.size)  # rows per rank, as torch.chunk splits
                start = min(len(parameter), mesh.shard.rank * most)
                serve_part(parameter, held, start, self, on_host=on_host)

    def _set_collectives(self) -> None:
        """Make FSDP use the groups of the mesh for its collectives, with sums instead of means."""
        for module, unit in zip(self._modules, self._units.names, strict=True):
            gathering = _FsdpAllGather(self.group, self._units, unit)
            scattering = _FsdpReduceScatter(self.group, self._units, unit)
            self._gathered.watch(module)
            # torch 2.13; before, all ranks must use the same parameters
            if hasattr(module, "set_reduce_scatter_unused_params"):
                module.set_reduce_scatter_unused_params(True)
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            module.set_custom_all_gather(gathering)  # type: ignore[arg-type]
            module.set_custom_reduce_scatter(scattering)  # type: ignore[arg-type]
            if not self.replicas.is_alone:
                module.set_all_reduce_hook(self._add_replicas)

    def _add_replicas(self, rows: Tensor) -> None:
        self.replicas.add(rows)

    def synced(self, leaves: Iterable[Tensor]) -> _GradientHandoff:
        """Return the object that passes the gradients of `leaves` from FSDP to the optimizer."""
        trained = [each for each in leaves if each.requires_grad]
        whole = [each for each in trained if id(each) in self._whole]
        split = [each for each in trained if id(each) not in self._whole]
        replicas = Replicas(whole, self._all) if whole else None
        return _GradientHandoff(
            split,
            self._keep_weights if self._stage == 2 else None,
            self._gathered,
            self._units,
            replicas,
        )

    def begin(self) -> None:
        """Start the forward and backward passes of a step.

        In stage 2, gathered weights stay in memory during the step; in stage 3, they are freed
        after each module. Outside of a step, they are freed after each module in both stages.
        """
        self._gathered.used.clear()
        self._gathered.let_go()
        self._units.begin()
        for module in self._modules:
            module.set_reshard_after_forward(
                self._stage == 3 and module is not self._modules[0], recurse=False
            )
        if self._stage == 2:
            self._keep_weights(True)

    def end(self) -> None:
        """End the forward and backward passes of a step."""
        for module in self._modules:
            module.set_reshard_after_forward(True, recurse=False)

    def _keep_weights(self, keeps: bool) -> None:
        """Set whether gathered weights stay in memory after a backward pass.

        If they stay, the next microbatch uses them without gathering them again.
        """
        for module in self._modules:
            module.set_reshard_after_backward(not keeps, recurse=False)

    @torch.no_grad()
    def publish(self) -> None:
        """Free the gathered weights, which are outdated after the rows were updated.

        With `on_host`, the rows are first copied from host memory to the device.
        """
        for parameter in self._moved:
            parameter.to_local().copy_(master_of(parameter))  # type: ignore[attr-defined]
        for module in self._modules:
            module.reshard()


def _shard(
    modules: Iterable[nn.Module],
    group: Group,
    whole: Collection[int],
    narrow: torch.dtype | None,
    wide: Collection[nn.Module],
) -> None:
    """Call `fully_shard` on each module; inner modules must come first.

    Weights are gathered in the dtype `narrow`, except for those of the modules in `wide`. `whole`
    has the `id` of each parameter that is not sharded.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = DeviceMesh.from_group(group.channel, group.device.type, mesh_dim_names=("shard",))
    own = MixedPrecisionPolicy(cast_forward_inputs=False)
    summed = torch.float32 if narrow is not None else None
    policy = MixedPrecisionPolicy(narrow, summed, cast_forward_inputs=False)
    for module in modules:
        _check_one_dtype(module, whole)
        kept = {each for each in module.parameters() if id(each) in whole} or None
        fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=True,
            mp_policy=own if module in wide else policy,
            ignored_params=kept,
        )


class _GatheredParameters:
    """Unsharded parameters, which FSDP substitutes for the sharded ones during a step.

    Their hooks call the hooks that the user registered on the sharded parameters.
    """

    def __init__(
        self, model: nn.Module, hooks: Mapping[str, Hooks], whole: Collection[int]
    ) -> None:
        self.used: set[int] = set()  # ids of the sharded parameters that had a gradient
        self.handed_over: list[Tensor] = []  # parameters whose gradient belongs to the last update
        self._whole = whole
        self._sharded = dict(model.named_parameters())
        self._names = {id(module): name for name, module in model.named_modules()}
        self._seen: set[str] = set()
        # the hook dicts of the original parameters, so that existing handles can remove hooks
        for name, (before, after) in hooks.items():
            held: Any = self._sharded[name]
            held._backward_hooks, held._post_accumulate_grad_hooks = before, after

    def watch(self, module: nn.Module) -> None:
        """Register hooks on the parameters of `module` when its first forward pass gathers them."""
        module.register_forward_pre_hook(self._look)

    def let_go(self) -> None:
        """Set the gradients of the last update to None, so that nothing is added to them."""
        for parameter in self.handed_over:
            parameter.grad = None
        self.handed_over.clear()

    def _look(self, module: nn.Module, _: Any) -> None:
        if self.handed_over and torch.is_grad_enabled():
            self.let_go()
        prefix = self._names[id(module)]
        for path, parameter in module.named_parameters():
            name = f"{prefix}.{path}" if prefix else path
            is_split = id(parameter) not in self._whole and not hasattr(parameter, "device_mesh")
            if name in self._seen or not is_split or not parameter.requires_grad:
                continue
            self._seen.add(name)
            register: Any = parameter.register_hook
            register(partial(_call_before, self._sharded[name]))
            parameter.register_post_accumulate_grad_hook(
                partial(self._call_after, self._sharded[name])
            )  # type: ignore[no-untyped-call]

    def _call_after(self, sharded: Any, parameter: Tensor) -> None:
        """Call the post-accumulate hooks that the sharded parameter has now.

        They include hooks that were added after construction.
        """
        for hook in list((sharded._post_accumulate_grad_hooks or {}).values()):
            hook(parameter)
        self.used.add(id(sharded))


def _call_before(sharded: Any, gradient: Tensor) -> Tensor:
    for hook in list((sharded._backward_hooks or {}).values()):
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    return gradient


def _hooks_of(named: Named) -> dict[str, Hooks]:
    """Return the gradient hooks of each parameter that has any, by name.

    A value is a pair: the tensor hooks, and the post-accumulate hooks.
    """
    found = {}
    for name, parameter in named:
        held: Any = parameter
        if held._backward_hooks or held._post_accumulate_grad_hooks:
            found[name] = held._backward_hooks, held._post_accumulate_grad_hooks
    return found


class _GradientHandoff:
    """Transfer of gradients from FSDP to the optimizer.

    FSDP leaves the shard of a gradient in the `.grad` of the parameter; the optimizer updates the
    master, which is the rows of this rank. The gradient also stays at the parameter, in the same
    memory, until a step starts or its module is called with gradients enabled. `replicas` sums the
    gradients of parameters that are not sharded.
    """

    def __init__(
        self,
        leaves: Sequence[Tensor],
        keep_weights: Any,
        gathered: _GatheredParameters,
        units: Units,
        replicas: Replicas | None,
    ) -> None:
        self._leaves, self._keep_weights, self._gathered = leaves, keep_weights, gathered
        self._units, self._replicas = units, replicas

    def used(self) -> list[float]:
        """Return 1 for each parameter that has a gradient on this rank in this step, otherwise 0.

        After these, the list has the number of times that this rank has gathered each unit, and a
        1.
        """
        return [
            float(id(leaf) in self._gathered.used) for leaf in self._leaves
        ] + self._units.counts()

    def keep_used(self, counts: Sequence[float]) -> None:
        """Set the gradient of each parameter that no rank has used to None, as in one process.

        Otherwise weight decay would change the parameter. `counts` are the sums of `used` over all
        ranks. Raises UserCodeError if the ranks have not gathered the same units.
        """
        num_leaves = len(self._leaves)
        self._units.check(counts[num_leaves:])
        for leaf, count in zip(self._leaves, counts[:num_leaves], strict=True):
            if not count:
                master_of(leaf).grad = leaf.grad = None

    def arm(self) -> None:
        """Prepare for the last backward pass of the step, which frees the gathered weights."""
        if self._keep_weights is not None:
            self._keep_weights(False)

    @torch.no_grad()
    def finish(self) -> None:
        """Pass the gradients to the masters, and sum those of parameters that are not sharded.

        The sum comes after the backward pass. During it, the all-reduce would run between the
        collectives of FSDP, in no fixed order.
        """
        for leaf in self._leaves:
            found: Any = leaf.grad
            master = master_of(leaf)
            master.grad = None if found is None else found.to_local().to(master.device)
            if master.device != leaf.device:  # the master has a copy on the host
                leaf.grad = None
        self._gathered.handed_over += [each for each in self._leaves if each.grad is not None]
        if self._replicas is not None:
            self._replicas.finish()

    asks_factor = False  # gradients are not compressed

    def keep(self, applied: bool | Tensor = True) -> None:
        """Do nothing, because there is no compression residual."""

    def held(self) -> list[Any]:
        return []

    def close(self) -> None:
        """Remove the hooks of parameters that are not sharded; FSDP itself cannot be removed."""
        if self._replicas is not None:
            self._replicas.close()


class _SendMemory:
    """Allocator of buffers in the memory of a group, for the FSDP collectives of one unit."""

    def __init__(self, group: Group, units: Units, unit: str) -> None:
        self._group, self._units, self._unit = group, units, unit

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._group.allocate(size, dtype, device)


class _FsdpAllGather(_SendMemory):
    """All-gather for FSDP that goes through `Group`.

    It is therefore counted, and visible to hang detection.
    """

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> Any:
        with self._units.count_gather(self._unit):
            return self._group.gather_into(output_tensor, input_tensor, is_async=async_op)


class _FsdpReduceScatter(_SendMemory):
    """Reduce-scatter for FSDP that goes through `Group`."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> None:
        assert op == dist.ReduceOp.SUM
        with self._units.run_reduce_scatter(self._unit):
            self._group.begin_to_scatter(output_tensor, input_tensor)()


def _find_whole(model: nn.Module, replicated: Collection[Tensor]) -> set[int]:
    """Return the `id` of each parameter in `replicated`; these are not sharded.

    Raises SpecError for one that is not a parameter of the model.
    """
    own = {id(each) for each in model.parameters()}
    for each in replicated:
        if id(each) not in own:
            what = (
                f"of shape {list(each.shape)}"
                if isinstance(each, Tensor)
                else f"{each!r}, which is not a tensor"
            )
            raise SpecError(
                f"replicated has a parameter that {type(model).__name__} does not have: {what}",
                hint=(
                    "give parameters of the model, as {model.scale}; "
                    "sum the gradients of others with Replicas"
                ),
            )
    return {id(each) for each in replicated}


def _check_gathered(named: Named) -> None:
    """Raise SpecError for an empty or non-contiguous parameter, which `fully_shard` rejects."""
    for name, parameter in named:
        if not parameter.numel():
            raise SpecError(
                f"stages 2 and 3 gather non-empty parameters, but {name} is empty: "
                f"{list(parameter.shape)}",
                hint="leave it out of the model, or set layout.zero_stage = 1",
            )
        if not parameter.is_contiguous():
            raise SpecError(
                "stages 2 and 3 gather contiguous parameters, "
                f"and {name} is not contiguous (for example channels_last)",
                hint=(
                    'set layout.zero_stage = 1, or leave out train.memory_format = "channels_last"'
                ),
            )


def _check_one_dtype(module: nn.Module, whole: Collection[int]) -> None:
    dtypes = {
        each.dtype
        for each in module.parameters()
        if id(each) not in whole and not hasattr(each, "device_mesh")
    }
    if len(dtypes) > 1:
        raise SpecError(
            "stages 2 and 3 gather parameters of one dtype, "
            f"and {type(module).__name__} has {', '.join(sorted(map(str, dtypes)))}",
            hint="set layout.zero_stage = 1",
        )


def _check_apart(model: nn.Module, units: Mapping[str, nn.Module], whole: Collection[int]) -> None:
    """Raise SpecError for a tied parameter that is in two units, or both in and outside of one."""
    homes: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in whole:
            continue
        unit = next((unit for unit in units if name.startswith(f"{unit}.")), "no unit")
        if homes.setdefault(id(parameter), unit) != unit:
            raise SpecError(
                f"{name} is tied to a parameter of another unit ({homes[id(parameter)]}, "
                f"here {unit}): both would gather it",
                hint=(
                    "set layout.zero_stage = 1, or name units of which each holds all of it: "
                    "memory.blocks"
                ),
            )
