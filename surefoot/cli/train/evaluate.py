"""`surefoot evaluate`."""

from __future__ import annotations

from surefoot.cli import options
from surefoot.cli.options import DataOption, JsonOption, QuietOption, RunArgument, SplitOption, StepOption, TracebackOption


def evaluate(
    run: RunArgument, split: SplitOption = None, step: StepOption = "best", data: DataOption = None, json: JsonOption = False,
    quiet: QuietOption = False, traceback: TracebackOption = False,
) -> None:  # fmt: skip
    """Evaluate the saved weights of a run on a split."""
    from surefoot.components.observe.console import format_score
    from surefoot.train.look_back import evaluate_run

    result, used = evaluate_run(run, step, split, data, quiet=quiet or json)
    if json:
        options.print_json({"run": str(run), "step": used, "split": result.split, "num_samples": result.num_samples,
                            "loss": result.loss, "metrics": result.metrics, "score": result.score, "value": result.value})  # fmt: skip
        return
    names = {"loss": result.loss, **result.metrics}
    for name, value in names.items():
        print(format_score(name, value, result.units.get(name, "")))
