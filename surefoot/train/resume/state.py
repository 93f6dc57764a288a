"""The state of a run as files of a checkpoint, and its restoration into the live objects.

Tensors that change only in an optimizer step (weights, optimizer state, weight average) are passed
by reference, to be copied during the next forward pass. The rest is copied at once: buffers, random
states, counters, the task's state.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from surefoot.components import checkpoint
from surefoot.components.checkpoint import Commit, Content
from surefoot.contract.manifest import Piece, name_of_rank
from surefoot.contract.state import Part, mark_same_part, master_of, part_of
from surefoot.runtime.attributes.stored import check_attributes, put_back_attributes
from surefoot.runtime.comm.group import ALONE, Group
from surefoot.train.assemble import Assembly
from surefoot.train.quiet import read_entry
from surefoot.train.resume.per_rank import rank_state, unsent
from surefoot.train.resume.state_files import (
    CLOCK,
    LIVE,
    OPTIMIZER,
    STATE,
    Files,
    index_weights,
    name_weight_files,
    write_config,
)

if TYPE_CHECKING:
    from surefoot.components.parallel.shard import Sharded
    from surefoot.train.step.ranks import Ranks

ROOT = "state"  # prefix of the names in the tree
OPTIMIZER_ROOT = f"{ROOT}/optimizer/"
COMPONENTS = {
    "optimizer": "optimizer",
    "random": "random states",
    "task": "task state",
    "buffers": "buffers",
    "plateau": "schedule",
    "average": "average",
    "extra": "buffers",
    "scaler": "scaler",
    "attributes": "buffers",
}
# buffers that must be finite; other buffers, such as masks, may be infinite
STATISTICS = ("running_mean", "running_var")


class LiveState:
    """State of a run: `take` returns the contents of a checkpoint, `restore` loads one."""

    def __init__(self, assembly: Assembly) -> None:
        self._assembly, self._model = assembly, assembly.model
        self._scaler = assembly.engine.policy.scaler
        named = list(self._model.named_parameters(remove_duplicate=False))
        self._names = {
            id(each): name
            for name, parameter in named
            for each in (parameter, master_of(parameter))
        }
        ranks = assembly.engine.steps.collectives.ranks
        self._sharded = None if ranks is None else ranks.sharded
        held = {} if self._sharded is None else dict(named)
        self._held = {name: master_of(parameter) for name, parameter in held.items()}
        self.attributes: tuple[str, ...] = ()  # of modules in the last checkpoint
        self.unsaved_attributes: tuple[str, ...] = ()  # changed, but not storable

    def num_bytes(self) -> int:
        """Return the approximate size of a checkpoint: weights, buffers, average, optimizer state.

        The state that an optimizer has not created yet is estimated.
        """
        named = checkpoint.module_state(self._model).tensors
        held = {id(tensor): tensor for tensor in named.values()}
        weights = sum(tensor.numel() * tensor.element_size() for tensor in held.values())
        trained = sum(
            p.numel() * p.element_size() for p in self._model.parameters() if p.requires_grad
        )
        average = 0 if self._assembly.engine.average is None else trained
        optimizers = [
            each for update in self._assembly.updates for each in update.guarded.optimizers
        ]
        of_optimizers = (
            trained * 2 if self._sharded is not None else sum(map(_optimizer_bytes, optimizers))
        )
        return weights + average + of_optimizers + unsent.num_bytes(self._ranks)

    # ---- taking

    @property
    def _ranks(self) -> Ranks | None:
        return self._assembly.engine.steps.collectives.ranks

    @property
    def is_shared(self) -> bool:
        """True if each rank holds state that no other rank has; all ranks then save together."""
        if self._ranks is None:
            return False
        return (
            self._sharded is not None
            or bool(unsent.powersgd_state_of(self._ranks, self._names))
            or rank_state.has_words(self._group, self._assembly.task)
            or rank_state.has_shards(self._group, self._assembly)
        )

    @property
    def _group(self) -> Group:
        return ALONE if self._ranks is None else self._ranks.group

    def gather(self) -> rank_state.PerRankState:
        """Return the state that differs between ranks, by file, on rank 0; nothing on other ranks.

        Every rank must call this. Raises NumbersError if ranks differ in an entry that the task
        declares replicated.
        """
        found = rank_state.gather(self._group, self._assembly.task)
        return found._replace(
            tensors=found.tensors | unsent.gather(self._ranks, self._names),
            shards=rank_state.gather_shards(self._group, self._assembly),
        )

    def take(
        self,
        step: int,
        more: Mapping[str, Any],
        clock: Mapping[str, float],
        of_ranks: rank_state.PerRankState | None = None,
    ) -> tuple[Content, Files]:
        """Return the contents of a checkpoint of `step`: copies, and tensors that are still live.

        The live tensors change in the next optimizer step. `more` is stored beside the state.
        `clock` has a file of its own: all other files are bitwise identical whenever the same steps
        were done. `of_ranks` is the result of `gather`.
        """
        self._assembly.trained.take_new(self._assembly)
        weights, moving = self._weights()
        of_ranks = of_ranks or rank_state.PerRankState()
        skeleton, tensors = self._split(rank_state.join_shards(more, of_ranks.shards))
        of_optimizer = {
            name: tensor for name, tensor in tensors.items() if name.startswith(OPTIMIZER_ROOT)
        }
        small = {
            name: tensor.clone().cpu().contiguous()
            for name, tensor in tensors.items()
            if name not in of_optimizer
        }
        moving[OPTIMIZER] = of_optimizer
        texts = {
            "state.json": json.dumps({"step": step, **skeleton}).encode(),
            CLOCK: json.dumps(clock).encode(),
            **({} if self._sharded is not None else index_weights(weights, moving)),
            **write_config(self._model),
        }
        gathered, texts = of_ranks.tensors, texts | of_ranks.texts
        finite = {
            name for name, parameter in self._model.named_parameters() if parameter.requires_grad
        }
        finite |= {
            name for name, _ in self._model.named_buffers() if name.rpartition(".")[2] in STATISTICS
        }
        finite |= {name for name, tensor in of_optimizer.items() if tensor.is_floating_point()}
        finite |= {
            name
            for file, held in gathered.items()
            if not rank_state.is_of_task(file)
            for name in held
        }
        content = Content(
            step=step,
            tensors={**weights, STATE: small, **gathered},
            texts=texts,
            finite=frozenset(finite),
        )
        if self._sharded is not None:
            return self._part_of_rank(content, moving, self._sharded)
        return content, {file: held for file, held in moving.items() if held}

    def _part_of_rank(
        self, content: Content, moving: Files, sharded: Sharded
    ) -> tuple[Content, Files]:
        """Return what this rank writes: its rows; rank 0 adds the rest; replicas write nothing."""
        is_first = sharded.group.is_first and sharded.replicas.is_first
        mine: Files = {}
        parts: dict[str, tuple[int, tuple[int, ...]]] = {}
        for file, held in moving.items():
            for name, tensor in held.items():
                part = self._part_of(name, tensor)
                if part is None:
                    if is_first:
                        mine.setdefault(file, {})[name] = tensor
                elif sharded.replicas.is_first and (len(tensor) or is_first):
                    mine.setdefault(name_of_rank(file, sharded.group.rank), {})[name] = tensor
                    parts[name] = part.start, part.whole
        return (
            replace(
                content,
                parts=parts,
                tensors=content.tensors if is_first else {},
                texts=content.texts if is_first else {},
            ),
            mine,
        )

    def _part_of(self, name: str, tensor: Tensor) -> Part | None:
        """Return which rows of the whole tensor are in `tensor`; None if it is whole.

        A tensor of optimizer state has the rows of its parameter if the shapes are equal.
        """
        if not name.startswith(OPTIMIZER_ROOT):
            return part_of(tensor)
        moved = self._local_rows_of(name)
        return (
            None
            if moved is None or tensor.ndim == 0 or tensor.shape != moved.shape
            else part_of(moved)
        )

    def _local_rows_of(self, name: str) -> Tensor | None:
        """Return this rank's rows of the parameter of state `name`; None if it is not sharded."""
        # the name of a parameter may contain "/"
        return self._held.get(name.partition("/state/")[2].rpartition("/")[0])

    def check(self) -> None:
        """Raise TaskError for state that a checkpoint cannot hold, before the first save."""
        for name, tensor in checkpoint.module_state(self._model).tensors.items():
            checkpoint.check_storable(name, tensor)
        self._split({})

    def _split(
        self, more: Mapping[str, Any], without: Collection[str] = ()
    ) -> tuple[Any, dict[str, Tensor]]:
        """Return the state as JSON tree and tensors, without the entries `without` of `state()`."""
        tree = self._tree()
        task = {name: value for name, value in tree["task"].items() if name not in without}
        skeleton, tensors = checkpoint.split({**tree, "task": task, **more}, ROOT)
        for name, tensor in tensors.items():
            checkpoint.check_storable(name, tensor)
        return skeleton, tensors

    def _weights(self) -> tuple[Files, Files]:
        """Return the model's tensors by file: buffers as copies, parameters themselves."""
        copied: Files = {}
        moving: Files = {}
        averages = self._averages()
        trained, frozen = name_weight_files(self._model)
        seen: set[Any] = set()
        for name, tensor in checkpoint.module_state(self._model).tensors.items():
            checkpoint.check_storable(name, tensor)
            if self._held:
                key: Any = id(master_of(tensor))
            else:
                key = (tensor.data_ptr(), tensor.shape, tensor.stride())
            if key in seen and tensor.numel():
                continue  # tied: stored once
            seen.add(key)
            if not isinstance(tensor, nn.Parameter):
                copied.setdefault(trained, {})[name] = _copy(averages.get(id(tensor), tensor))
                if id(tensor) in averages:
                    copied.setdefault(LIVE, {})[name] = _copy(tensor)
            elif id(master_of(tensor)) in averages:
                moving.setdefault(trained, {})[name] = averages[id(master_of(tensor))]
                moving.setdefault(LIVE, {})[name] = master_of(tensor)
            elif not tensor.requires_grad:
                moving.setdefault(frozen, {})[name] = master_of(tensor)
            else:
                moving.setdefault(trained, {})[name] = master_of(tensor)
        return copied, moving

    def _averages(self) -> dict[int, Tensor]:
        """Return the average of each parameter and buffer that has one, by id."""
        average = self._assembly.engine.average
        return {} if average is None else average.by_id()

    def _tree(self) -> dict[str, Any]:
        average, feed = self._assembly.engine.average, self._assembly.feed
        held, task_state = checkpoint.module_state(self._model), self._task_state()
        return {
            "optimizer": self._optimizers(),
            "average": None if average is None else average.num_updates,
            "plateau": self._assembly.schedule.state(),
            # with several ranks it differs between ranks
            "microbatch": feed.microbatch if feed.share.size == 1 else None,
            "scaler": None if self._scaler is None else self._scaler.state_dict(),
            "extra": {
                name: value if isinstance(value, Tensor) else copy.deepcopy(value)
                for name, value in held.extra.items()
            },
            "buffers": held.buffers,
            "task": {name: read_entry(name, value) for name, value in task_state.items()},
            "random": checkpoint.random_states(),
            **self._attributes(task_state),
            **self._assembly.trained.state(self._assembly),
        }

    def _attributes(self, task_state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the module attributes that have changed since the model was built, detached."""
        changed = self._assembly.engine.attributes.find_changed(task_state)
        stored, self.unsaved_attributes = checkpoint.encode_storable(self._model, changed)
        self.attributes = tuple(stored.get("values", ()))
        return {"attributes": stored} if stored else {}

    def _task_state(self) -> Mapping[str, Any]:
        state = self._assembly.task.state
        return {} if state is None else state()

    def _optimizers(self) -> dict[str, Any]:
        return {update.name: update.guarded.state(self._names) for update in self._assembly.updates}

    def digests(self, more: Mapping[str, Any]) -> dict[str, str]:
        """Return a digest of each component of the state; equal for runs with identical state."""
        content, moving = self.take(0, more, {})
        skeleton = json.loads(content.texts["state.json"])
        found: dict[str, dict[str, Tensor]] = {"parameters": {}, "optimizer": {}, "buffers": {}}
        found["optimizer"] = moving.get(OPTIMIZER, {})
        for file, held in moving.items():
            if file != OPTIMIZER:
                found["parameters"] |= {f"{file}/{name}": tensor for name, tensor in held.items()}
        for file, tensors in content.tensors.items():
            for name, tensor in tensors.items():
                part = (
                    COMPONENTS.get(name.split("/")[1], "counters") if file == STATE else "buffers"
                )
                found.setdefault(part, {})[name] = tensor
        words: dict[str, dict[str, Any]] = {}
        for key, value in skeleton.items():
            words.setdefault(COMPONENTS.get(key, "counters"), {})[key] = value
        return {
            part: _digest(found.get(part, {}), words.get(part))
            for part in dict.fromkeys((*found, *words))
        }

    def replicated_state(self, group: Group) -> list[tuple[Group, str, dict[str, Tensor]]]:
        """Return the state that is equal on ranks, as (group, digest of non-tensors, tensors).

        All ranks of `group` hold the buffers, and unsharded weights; replicas also hold the master
        weights, the optimizer state and the average.
        """
        skeleton, kept = self._split({}, without=rank_state.find_per_rank(self._assembly.task))
        of_all = {f"buffers/{name}": each for name, each in self._model.named_buffers()}
        if self._sharded is None or not self._sharded.splits_weights:
            of_all |= {f"weights/{name}": each for name, each in self._model.named_parameters()}
        of_copies = {
            f"masters/{name}": master_of(each) for name, each in self._model.named_parameters()
        } | kept
        average = self._assembly.engine.average
        of_copies |= {
            f"averages/{number}": each
            for number, each in enumerate([] if average is None else average.by_id().values())
        }
        words = hashlib.sha256(json.dumps(skeleton, sort_keys=True).encode()).hexdigest()
        return [
            (group, "", of_all),
            (group if self._sharded is None else self._sharded.replicas, words, of_copies),
        ]

    # ---- putting back

    def restore(
        self,
        commit: Commit,
        adapt: Callable[[dict[str, Any]], None] | None = None,
        *,
        keep_buffers: bool = False,
    ) -> dict[str, Any]:
        """Load a checkpoint into the objects; return the tree of values that was saved.

        Raises RunFolderError, before anything changes, for a checkpoint that does not fit. `adapt`
        may change the tree before it is used: a fork takes some values from its spec. With
        `keep_buffers` the model keeps its non-persistent buffers whose shape differs, for a changed
        task.
        """
        from surefoot.components.optim.masters import publish
        from surefoot.train.resume.put_back import fit_model, put_back_task_state, put_back_training

        skeleton = commit.json("state.json")
        with checkpoint.as_run_folder_errors(commit.folder):
            self._assembly.trained.restore(self._assembly, skeleton)
        fit_model(self._group, self._assembly, commit, skeleton)
        held_tensors = checkpoint.module_state(self._model, commit.pieces(checkpoint.MODEL)).tensors
        own = {name: master_of(tensor) for name, tensor in held_tensors.items()}
        with checkpoint.as_run_folder_errors(commit.folder):
            checkpoint.check_buffers(self._model, skeleton["buffers"])
            if not keep_buffers:
                check_attributes(self._model, skeleton.get("attributes", {}))
        averages = self._averages()
        served = {name: averages.get(id(tensor), tensor) for name, tensor in own.items()}
        checkpoint.read_weights(commit, served, checkpoint.MODEL)
        if averages:
            live = {name: tensor for name, tensor in own.items() if id(tensor) in averages}
            checkpoint.read_weights(commit, live, LIVE)
        publish(self._model.parameters())
        _, held = checkpoint.split({"optimizer": self._optimizers()}, ROOT)
        has_moments = bool(commit.names(OPTIMIZER))  # no file without tensors
        moments = (
            commit.read(OPTIMIZER, lambda name, piece: self._target(name, held.get(name), piece))
            if has_moments
            else {}
        )
        tensors = moments | commit.read(STATE)
        with checkpoint.as_run_folder_errors(commit.folder):
            tree = {
                **checkpoint.join(skeleton, tensors, commit.folder),
                "clock": commit.json("clock.json"),
            }
            of_rank = rank_state.read(self._group, self._assembly.task, commit)
            tree["task"] = {**tree["task"], **of_rank}
            if adapt is not None:
                adapt(tree)
            put_back_training(self._assembly, self._names, tree)
            checkpoint.put_back_buffers(self._model, tree["buffers"], keep_others=keep_buffers)
            attributes, task_state = tree.get("attributes", {}), self._task_state()
            put_back_attributes(self._model, attributes, task_state, keep_others=keep_buffers)
            extra, task, random = tree["extra"], dict(tree["task"]), tree["random"]
        checkpoint.put_back_extra(self._model, extra)
        put_back_task_state(self._task_state(), task)
        with checkpoint.as_run_folder_errors(commit.folder):
            self._assembly.told.extend(unsent.restore(self._ranks, self._names, commit))
            checkpoint.restore_random(random)
        return tree

    def keep_current(self, parts: Collection[str]) -> Callable[[dict[str, Any]], None]:
        """Return a function for `restore` that keeps the current values of `parts`.

        Used by `fault.forget` to show what each part is needed for.
        """
        now = copy.deepcopy(self._tree())

        def forget(tree: dict[str, Any]) -> None:
            for name, update in tree["optimizer"].items():
                if "optimizer" in parts:
                    update["optimizers"] = now["optimizer"][name]["optimizers"]
                if "schedule" in parts:
                    update["applied_steps"] = now["optimizer"][name]["applied_steps"]
            tree.update({"plateau": now["plateau"]} if "schedule" in parts else {})
            tree.update({part: now[part] for part in ("random", "task") if part in parts})

        return forget

    def _target(self, name: str, held: Tensor | None, piece: Piece) -> Tensor:
        """Return the tensor into which `piece` is read: in place if shapes match, else a new one.

        A step counter may be shared by many parameters, so it is read into a new tensor.
        """
        moved = self._local_rows_of(name)
        part = None if moved is None else part_of(moved)
        if moved is None or part is None or piece.shape != part.whole:
            fits = held is not None and held.ndim > 0 and tuple(held.shape) == piece.shape
            return held if held is not None and fits else checkpoint.create("", piece)
        rows = replace(piece, shape=tuple(moved.shape))
        return mark_same_part(
            held if held is not None and held.shape == moved.shape else checkpoint.create("", rows),
            moved,
        )


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().cpu().contiguous()


def _digest(tensors: Mapping[str, Tensor], words: Any) -> str:
    taken = hashlib.sha256(json.dumps(words, sort_keys=True).encode())
    for name in sorted(tensors):
        taken.update(name.encode())
        taken.update(checkpoint.as_buffer(tensors[name].detach().cpu().contiguous()))
    return taken.hexdigest()


def _optimizer_bytes(optimizer: Optimizer) -> int:
    """Return the size of an optimizer's state, estimated for parameters that have none yet.

    SGD has one value per weight with momentum and none without; two are assumed for the others.
    """
    total = 0
    for group in optimizer.param_groups:
        is_sgd = "momentum" in group and isinstance(optimizer, torch.optim.SGD)
        values = int(bool(group["momentum"])) if is_sgd else 2
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {}).values()
            held = [each for each in state if isinstance(each, Tensor)]
            own = parameter.numel() * parameter.element_size() * values * parameter.requires_grad
            total += sum(each.numel() * each.element_size() for each in held) if held else own
    return total
