"""Names of a spec's keys in other libraries, and suggestions for a key that does not exist."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from surefoot.core.errors import find_nearest, hint_nearest, plain_name

# values in PyTorch, in lower case and without "_", and those of a spec
VALUES = {
    "float16": "fp16",
    "half": "fp16",
    "bfloat16": "bf16",
    "float32": "fp32",
    "float": "fp32",
    "tfloat32": "tf32",
    "adam8bit": "adam",
    "adamw8bit": "adamw",
    "constantlr": "constant",
    "linearlr": "linear",
    "steplr": "step",
    "multisteplr": "multi_step",
    "exponentiallr": "exponential",
    "polynomiallr": "polynomial",
    "cosineannealing": "cosine",
    "cosineannealinglr": "cosine",
    "cosineannealingwarmrestarts": "cosine_restarts",
    "onecyclelr": "one_cycle",
    "reducelronplateau": "plateau",
}
# optimizers of PyTorch that a task can return, but a spec cannot name
OTHER_OPTIMIZERS = (
    *("RAdam", "NAdam", "Adamax", "SparseAdam", "Adagrad", "Adadelta", "Adafactor"),
    *("RMSprop", "Rprop", "ASGD"),
)
NEAR, NEAR_IN_TABLE = 0.75, 0.5  # how alike two names are, from 0 to 1
MAX_SUGGESTIONS = 4  # suggestions
TABLES = {
    "optimizer": "optim",
    "optimiser": "optim",
    "optimization": "optim",
    "scheduler": "schedule",
    "lr_scheduler": "schedule",
    "training": "train",
    "trainer": "train",
    "dataloader": "loader",
    "data_loader": "loader",
    "dataset": "data",
    "model": "task",
    "eval": "evaluate",
    "evaluation": "evaluate",
    "validation": "evaluate",
    "val": "evaluate",
    "amp": "precision",
    "ddp": "layout",
    "fsdp": "layout",
    "parallel": "layout",
    "distributed": "layout",
    "logging": "observe",
    "log": "observe",
    "checkpoints": "checkpoint",
    "save": "checkpoint",
}
KEYS: Mapping[str, Sequence[str]] = {
    "optim.name": ("optimizer", "optimiser", "type", "kind", "algorithm"),
    "optim.lr": (
        "learning_rate",
        "learningrate",
        "base_lr",
        "max_lr",
        "peak_lr",
        "initial_lr",
        "rate",
        "step_size",
    ),
    "optim.weight_decay": ("weightdecay", "wd", "l2", "lambda"),
    "optim.no_decay": ("no_weight_decay", "decay_exclude"),
    "optim.betas": ("beta", "beta1", "beta2", "adam_betas", "beta_1", "beta_2"),
    "optim.eps": ("epsilon", "adam_epsilon"),
    "optim.clip": (
        "clip_norm",
        "clip_grad",
        "clip_grad_norm",
        "grad_clip",
        "gradient_clip",
        "gradient_clip_val",
        "gradient_clipping",
        "max_norm",
        "max_grad_norm",
    ),
    "optim.clip_value": ("clip_grad_value", "max_grad_value"),
    "optim.trust_coefficient": ("trust_coef",),
    "optim.lr_multipliers": ("layer_rates", "layerwise_lr"),
    "optim.ema": ("ema_decay", "averaging", "swa"),
    "schedule.name": ("scheduler", "lr_scheduler", "lr_scheduler_type", "type", "kind"),
    "schedule.warmup": (
        "warmup_steps",
        "warmup_epochs",
        "num_warmup_steps",
        "warmup_ratio",
        "warm_up",
    ),
    "schedule.floor": ("min_lr", "eta_min", "final_lr", "end_lr"),
    "schedule.factor": ("gamma",),
    "schedule.every": ("step_size",),
    "train.length": (
        "epochs",
        "epoch",
        "n_epochs",
        "num_epochs",
        "max_epochs",
        "num_train_epochs",
        "steps",
        "n_steps",
        "num_steps",
        "max_steps",
        "total_steps",
        "iterations",
        "iters",
        "max_iters",
        "num_iterations",
        "duration",
    ),
    "train.batch": (
        "batch_size",
        "batchsize",
        "bs",
        "global_batch_size",
        "train_batch_size",
        "per_device_train_batch_size",
    ),
    "train.microbatch": ("micro_batch", "micro_batch_size", "microbatch_size"),
    "train.accumulate": (
        "grad_accum",
        "gradient_accumulation",
        "gradient_accumulation_steps",
        "accumulate_grad_batches",
        "accumulation",
        "accumulation_steps",
    ),
    "train.seed": ("random_seed", "random_state"),
    "train.device": ("gpu", "gpus", "cuda", "accelerator"),
    "train.threads": ("num_threads",),
    "train.batchnorm": ("sync_batchnorm", "sync_bn"),
    "train.deterministic": ("determinism", "use_deterministic_algorithms"),
    "train.cudnn_benchmark": ("benchmark",),
    "loader.workers": ("num_workers", "n_workers", "num_proc"),
    "loader.prefetch": ("prefetch_factor",),
    "data.folder": ("root", "path", "dir", "data_dir", "data_path"),
    "data.last_batch": ("drop_last",),
    "evaluate.every": (
        "eval_every",
        "eval_steps",
        "eval_interval",
        "val_every",
        "val_check_interval",
        "interval",
    ),
    "evaluate.batch": (
        "eval_batch_size",
        "val_batch_size",
        "batch_size",
        "per_device_eval_batch_size",
    ),
    "evaluate.batches": (
        "limit_val_batches",
        "limit_eval_batches",
        "eval_batches",
        "eval_iters",
        "max_eval_batches",
    ),
    "evaluate.score": ("metric", "monitor", "metric_for_best_model"),
    "evaluate.patience": ("early_stopping", "early_stopping_patience"),
    "precision.compute": ("dtype", "amp", "mixed_precision", "autocast", "precision"),
    "compile.what": ("compile", "enabled", "torch_compile"),
    "memory.activation_checkpointing": (
        "gradient_checkpointing",
        "checkpointing",
        "remat",
    ),
    "layout.zero_stage": ("zero",),
    "layout.shard": ("fsdp", "sharding"),
    "layout.replicate": ("ddp", "world_size", "num_ranks", "ranks"),
    "layout.bucket_size": ("bucket_cap_mb",),
    "layout.hang_timeout": ("stall_timeout", "heartbeat_timeout"),
    "checkpoint.every": (
        "save_every",
        "save_steps",
        "save_interval",
        "checkpoint_every",
        "interval",
    ),
    "checkpoint.keep": ("max_to_keep", "save_total_limit", "save_last"),
    "checkpoint.keep_best": ("save_top_k", "save_best"),
    "observe.every": (
        "log_every",
        "log_interval",
        "logging_steps",
        "log_every_n_steps",
        "interval",
    ),
}


def hint_value(dotted: str, given: str, options: Sequence[str]) -> str:
    """Return a hint with the one of `options` that `given`, a value of the key `dotted`, may mean.

    It is "" for none. The name of an optimizer that only a task can return is never taken for one
    that the spec can name.

    >>> hint_value("optim.name", "AdamW", ["adam", "adamw"])
    "did you mean 'adamw'? "
    >>> hint_value("optim.name", "RAdam", ["adam", "adamw"])
    "return torch.optim.RAdam from the task's optimizer(groups), or choose a built-in one: "
    """
    plain = plain_name(given.removeprefix("torch.").removeprefix("optim."))
    other = next((each for each in OTHER_OPTIMIZERS if each.lower() == plain), None)
    if dotted == "optim.name" and other is not None:
        own = f"return torch.optim.{other} from the task's optimizer(groups)"
        return f"{own}, or choose a built-in one: "
    value = VALUES.get(plain, "")
    return hint_nearest(value if value in options else plain, options)


def suggest(table: str | None, key: str, names: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the dotted keys that a user may mean by `table.key`, most likely first; at most 4.

    `names` holds the valid keys of each table. Keys of `table` are searched first, then those of
    all tables. If `table` is None, all tables are searched.

    >>> names = {"optim": ["name", "lr"], "train": ["length", "batch"], "evaluate": ["batch"]}
    >>> suggest("optim", "learning-rate", names), suggest("train", "lr", names)
    (['optim.lr'], ['optim.lr'])
    >>> suggest(None, "batch", names)
    ['train.batch', 'evaluate.batch']
    """
    plain = key.lower().replace("-", "_")
    known = [f"{each}.{name}" for each, keys in names.items() for name in keys]
    inside = [each for each in known if each.startswith(f"{table}.")]
    for dotted, cutoff in ((inside, NEAR_IN_TABLE), (known, NEAR)):
        found = [each for each in dotted if each.partition(".")[2] == plain]
        found += [each for each in dotted if plain in KEYS.get(each, ())]
        if not found:
            words = {
                word: each
                for each in reversed(dotted)
                for word in (*KEYS.get(each, ()), each.partition(".")[2])
            }
            found = [words[word] for word in find_nearest(plain, words, n=1, cutoff=cutoff)]
        if found:
            return list(dict.fromkeys(found))[:MAX_SUGGESTIONS]
    return []


def as_value(dotted: str, key: str, value: str) -> str:
    """Return `value` in the form that the key `dotted` takes: train.length needs a unit.

    `key` is the name that the user gave; it determines the unit.

    >>> as_value("train.length", "epochs", "3"), as_value("train.length", "max_steps", "500")
    ('3 epochs', '500 steps')
    >>> as_value("optim.lr", "lr", "3")
    '3'
    """
    unit = "epochs" if "epoch" in key.lower() else "steps"
    return f"{value} {unit}" if dotted == "train.length" and value.isdecimal() else value
