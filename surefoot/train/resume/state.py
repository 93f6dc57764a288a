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
from surefoot.components.optim import master_of, publish
from surefoot.components.parallel import Sharded
from surefoot.contract.manifest import Piece, name_of_rank
from surefoot.contract.state import Part, laid_by, part_of
from surefoot.core.errors import RunFolderError
from surefoot.runtime.attributes import check_attributes, put_back_attributes
from surefoot.runtime.comm import ALONE, Group
from surefoot.train.assemble import Assembly
from surefoot.train.quiet import read_entry, restore_entry
from surefoot.train.resume.per_rank import rank_state, unsent
from surefoot.train.resume.per_rank.rank_state import Gathered

if TYPE_CHECKING:
    from surefoot.train.step.ranks import Ranks

CLOCK = "clock.json"
OPTIMIZER, STATE, LIVE = "optimizer.safetensors", "state.safetensors", "weights.safetensors"
ROOT = "state"  # the tree's names begin so
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
# buffers that are finite wherever a model is sound; a mask may well be infinite
STATISTICS = ("running_mean", "running_var")
Files = dict[str, dict[str, Tensor]]


class LiveState:
    """State of a run's objects: `take` returns its parts, `restore` loads a checkpoint."""

    def __init__(self, assembly: Assembly) -> None:
        self._assembly, self._model = assembly, assembly.model
        self._scaler = assembly.engine.policy.scaler
        named = list(self._model.named_parameters(remove_duplicate=False))
        self._names = {
            id(each): name
            for name, parameter in named
            for each in (parameter, master_of(parameter))
        }
        ranks = assembly.engine.stepper.ranks
        self._sharded = None if ranks is None else ranks.sharded
        self._held = (
            {}
            if self._sharded is None
            else {name: master_of(parameter) for name, parameter in named}
        )
        self.attributes: tuple[str, ...] = ()  # of modules, that the last checkpoint held
        self.unsaved_attributes: tuple[str, ...] = ()  # that change and that no checkpoint can hold

    def num_bytes(self) -> int:
        """Return the approximate size of a checkpoint: weights, buffers, average, optimizer state.

        The state of the optimizers is counted where they have made it already, else estimated.
        """
        held = {id(tensor): tensor for tensor in checkpoint.held_by(self._model).tensors.values()}
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
        return self._assembly.engine.stepper.ranks

    @property
    def is_shared(self) -> bool:
        """True if each rank holds state that no other rank has; all ranks then save together."""
        if self._ranks is None:
            return False
        return (
            self._sharded is not None
            or bool(unsent.held_by(self._ranks, self._names))
            or self._has_words
        )

    @property
    def _has_words(self) -> bool:
        """True if several ranks train and the task defines `state_on_ranks`."""
        return not self._group.is_alone and bool(self._assembly.task.state_on_ranks)

    @property
    def _group(self) -> Group:
        return ALONE if self._ranks is None else self._ranks.group

    def gather(self) -> Gathered:
        """Return the state that only single ranks hold, by file, on rank 0; nothing on the others.

        Every rank must call this. Raises NumbersError if ranks differ in an entry that the task
        declares replicated.
        """
        found = (
            rank_state.gather(self._group, self._assembly.task) if self._has_words else Gathered()
        )
        return found._replace(tensors=found.tensors | unsent.gather(self._ranks, self._names))

    def take(
        self,
        step: int,
        more: Mapping[str, Any],
        clock: Mapping[str, float],
        of_ranks: Gathered | None = None,
    ) -> tuple[Content, Files]:
        """Return the contents of a checkpoint of `step`: copies, and tensors that are still live.

        The live tensors change in the next optimizer step. `more` is stored beside the state.
        `clock` has a file of its own: all other files are bitwise identical whenever the same steps
        were done. `of_ranks` is the result of `gather`.
        """
        self._assembly.trained.take_new(self._assembly)
        weights, moving = self._weights()
        skeleton, tensors = self._split(more)
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
            **self._texts(weights, moving),
        }
        gathered, texts = (of_ranks or Gathered()).tensors, texts | (of_ranks or Gathered()).texts
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
            return self._of_this_rank(content, moving, self._sharded)
        return content, {file: held for file, held in moving.items() if held}

    def _of_this_rank(
        self, content: Content, moving: Files, sharded: Sharded
    ) -> tuple[Content, Files]:
        """Return the part that this rank writes: its rows; rank 0 the rest; a replica nothing."""
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
        """Return the rows that a tensor of the state holds of the whole; None for a whole tensor.

        Optimizer state has tensors of the parameter's shape.
        """
        if not name.startswith(OPTIMIZER_ROOT):
            return part_of(tensor)
        moved = self._moved(name)
        return (
            None
            if moved is None or tensor.ndim == 0 or tensor.shape != moved.shape
            else part_of(moved)
        )

    def _moved(self, name: str) -> Tensor | None:
        """Return the local rows of an optimizer state tensor's parameter; None if not sharded."""
        # a parameter's own name may have a "/"
        return self._held.get(name.partition("/state/")[2].rpartition("/")[0])

    def check(self) -> None:
        """Raise TaskError for state that a checkpoint cannot hold, before the first save."""
        for name, tensor in checkpoint.held_by(self._model).tensors.items():
            checkpoint.check_storable(name, tensor)
        self._split({})

    def _split(
        self, more: Mapping[str, Any], without: Collection[str] = ()
    ) -> tuple[Any, dict[str, Tensor]]:
        """Return the tree and its tensors, without the `without` entries of `state()`."""
        tree = self._tree()
        task = {name: value for name, value in tree["task"].items() if name not in without}
        skeleton, tensors = checkpoint.split({**tree, "task": task, **more}, ROOT)
        for name, tensor in tensors.items():
            checkpoint.check_storable(name, tensor)
        return skeleton, tensors

    def _weights(self) -> tuple[Files, Files]:
        """Return the model's tensors by file: buffers copied, parameters live, frozen apart."""
        copied: Files = {}
        moving: Files = {}
        averages = self._averages()
        trained, frozen = self._file_names()
        seen: set[Any] = set()
        for name, tensor in checkpoint.held_by(self._model).tensors.items():
            checkpoint.check_storable(name, tensor)
            if self._held:
                key: Any = id(master_of(tensor))
            else:
                key = (tensor.data_ptr(), tensor.shape, tensor.stride())
            if key in seen and tensor.numel():
                continue  # tied: stored once
            seen.add(key)
            if not isinstance(tensor, nn.Parameter):
                copied.setdefault(trained, {})[name] = _copied(averages.get(id(tensor), tensor))
                if id(tensor) in averages:
                    copied.setdefault(LIVE, {})[name] = _copied(tensor)
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

    def _file_names(self) -> tuple[str, str]:
        """Return the file names for trained and frozen weights, in Hugging Face's scheme."""
        if all(parameter.requires_grad for parameter in self._model.parameters()):
            return "model.safetensors", ""
        return "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"

    def _texts(self, weights: Files, moving: Files) -> dict[str, bytes]:
        """Return files for other libraries: index of a split model, and Hugging Face config."""
        texts = {}
        parts = {
            file: {**weights.get(file, {}), **moving.get(file, {})}
            for file in {*weights, *moving}
            if file.startswith("model-")
        }
        if parts and self._sharded is None:
            total = sum(
                tensor.numel() * tensor.element_size()
                for held in parts.values()
                for tensor in held.values()
            )
            where = {name: file for file, held in sorted(parts.items()) for name in held}
            texts["model.safetensors.index.json"] = json.dumps(
                {"metadata": {"total_size": total}, "weight_map": where}
            ).encode()
        config = getattr(self._model, "config", None)
        if callable(getattr(config, "to_json_string", None)) and callable(
            getattr(self._model, "save_pretrained", None)
        ):
            texts["config.json"] = str(config.to_json_string()).encode()  # type: ignore[union-attr]
        return texts

    def _tree(self) -> dict[str, Any]:
        average, feed = self._assembly.engine.average, self._assembly.feed
        held, task_state = checkpoint.held_by(self._model), self._task_state()
        return {
            "optimizer": self._optimizers(),
            "average": None if average is None else average.num_updates,
            "plateau": self._assembly.schedule.state(),
            # with several ranks it is cut for each rank
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
        changed = self._assembly.engine.stepper.attributes.find_changed(task_state)
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

    def compared(self, group: Group) -> list[tuple[Group, str, dict[str, Tensor]]]:
        """Return the state that ranks hold alike: the group, a digest of non-tensors, the tensors.

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
        """Load a checkpoint into the objects; return what was saved beside them.

        Raises RunFolderError, before anything changes, for a checkpoint that does not fit. `adapt`
        may change the tree of the small state: a fork takes some of it from its spec. With
        `keep_buffers` the model keeps its non-persistent buffers whose shape differs, for a changed
        task.
        """
        skeleton = commit.json("state.json")
        with checkpoint.taken_from(commit.folder):
            self._assembly.trained.restore(self._assembly, skeleton)
        held_tensors = checkpoint.held_by(self._model, commit.pieces(checkpoint.MODEL)).tensors
        own = {name: master_of(tensor) for name, tensor in held_tensors.items()}
        self._check_fit(commit, skeleton)
        with checkpoint.taken_from(commit.folder):
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
        has_moments = bool(commit.names(OPTIMIZER))  # what holds no tensors is not written
        moments = (
            commit.read(OPTIMIZER, lambda name, piece: self._fitting(name, held.get(name), piece))
            if has_moments
            else {}
        )
        tensors = moments | commit.read(STATE)
        with checkpoint.taken_from(commit.folder):
            tree = {
                **checkpoint.join(skeleton, tensors, commit.folder),
                "clock": commit.json("clock.json"),
            }
            tree["task"] = {
                **tree["task"],
                **rank_state.read(self._group, self._assembly.task, commit),
            }
            if adapt is not None:
                adapt(tree)
            self._put_back(tree)
            checkpoint.put_back_buffers(self._model, tree["buffers"], keep_others=keep_buffers)
            put_back_attributes(
                self._model,
                tree.get("attributes", {}),
                self._task_state(),
                keep_others=keep_buffers,
            )
            extra, task, random = tree["extra"], dict(tree["task"]), tree["random"]
        self._put_back_of_task(extra, task)
        with checkpoint.taken_from(commit.folder):
            self._assembly.told.extend(unsent.restore(self._ranks, self._names, commit))
            checkpoint.restore_random(random)
        return tree

    def forgetting(self, parts: Collection[str]) -> Callable[[dict[str, Any]], None]:
        """Return a function that keeps the current values of these parts when a checkpoint is read.

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

    def _fitting(self, name: str, held: Tensor | None, piece: Piece) -> Tensor:
        """Return the tensor into which `piece` is read: in place if shapes match, else a new one.

        A step counter may be shared by many parameters, so it is read into a new tensor.
        """
        moved = self._moved(name)
        part = None if moved is None else part_of(moved)
        if moved is None or part is None or piece.shape != part.whole:
            fits = held is not None and held.ndim > 0 and tuple(held.shape) == piece.shape
            return held if held is not None and fits else checkpoint.create("", piece)
        rows = replace(piece, shape=tuple(moved.shape))
        return laid_by(
            held if held is not None and held.shape == moved.shape else checkpoint.create("", rows),
            moved,
        )

    def _check_fit(self, commit: Commit, skeleton: Any) -> None:
        step = skeleton.get("step", commit.manifest.step) if isinstance(skeleton, dict) else None
        if step != commit.manifest.step:
            raise RunFolderError(
                f"{commit.folder} holds the state after step {step}: it was renamed",
                hint="remove it, or name it by its step",
            )
        rank_state.check_fit(self._group, self._assembly.task, commit)
        stated = set(skeleton.get("optimizer", {})) if isinstance(skeleton, dict) else set()
        own = {update.name for update in self._assembly.updates}
        is_averaged = bool(commit.names(LIVE))
        if stated != own or is_averaged != (self._assembly.engine.average is not None):
            held = f"{sorted(stated)}{' and an average of the weights' if is_averaged else ''}"
            raise RunFolderError(
                f"{commit.folder} holds the updates {held}, the task has {sorted(own)}",
                hint="go on with the task and the spec that the run had",
            )

    def _put_back(self, tree: Mapping[str, Any]) -> None:
        for update in self._assembly.updates:
            update.guarded.restore(tree["optimizer"][update.name], self._names)
        if self._assembly.engine.average is not None:
            self._assembly.engine.average.restore(tree["average"])
        self._assembly.schedule.restore(tree["plateau"])
        self._take_microbatch(tree.get("microbatch"))
        # a fork, or a commit before there were any, has none
        if self._scaler is not None and tree.get("scaler") is not None:
            self._scaler.load_state_dict(tree["scaler"])

    def _take_microbatch(self, saved: int | None) -> None:
        """Use the saved microbatch if it is smaller: a step that ran out of memory halved it."""
        feed = self._assembly.feed
        if saved is not None and saved < feed.microbatch:
            self._assembly.told.append(
                f"microbatch {saved:,}, not {feed.microbatch:,}: memory had run out with that"
            )
            feed.microbatch = saved

    def _put_back_of_task(self, extra: Any, task: Mapping[str, Any]) -> None:
        """Restore the state that user code handles: get_extra_state and the task's `state()`."""
        checkpoint.put_back_extra(self._model, extra)
        state = self._task_state()
        if missing := [name for name in state if name not in task]:
            raise RunFolderError(
                f"the task's state() names {missing[0]!r}, of which the commit holds nothing"
            )
        for name, value in task.items():
            if name not in state:
                raise RunFolderError(
                    f"the commit holds the task's state {name!r}, which its state() no longer names"
                )
            restore_entry(name, state[name], value)


def _copied(tensor: Tensor) -> Tensor:
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
        values = (
            int(bool(group["momentum"]))
            if "momentum" in group and isinstance(optimizer, torch.optim.SGD)
            else 2
        )
        for parameter in group["params"]:
            held = [
                each
                for each in optimizer.state.get(parameter, {}).values()
                if isinstance(each, Tensor)
            ]
            own = (
                parameter.numel() * parameter.element_size() * values
                if parameter.requires_grad
                else 0
            )
            total += sum(each.numel() * each.element_size() for each in held) if held else own
    return total
