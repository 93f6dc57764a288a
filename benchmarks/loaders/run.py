"""Loaders beside each other.

JPEGs to augmented batches by two workers, going on anywhere, and what steps wait for their data.

python -m benchmarks.loaders.run [--only photos|ceiling|going_on|waiting] [--data FOLDER]
                                 [--rounds 7] [--show]
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.loaders import sets
from benchmarks.measured import (
    ROOT,
    make_parser,
    measure,
    ratio_of,
    render_conditions,
    render_interval,
    show,
    standing_of,
)
from surefoot.core.statistics import Interval, median_interval
from surefoot.core.units import format_percent, format_seconds
from surefoot.trial import Arm, Trial, markdown, read_trial

FOLDER = Path(__file__).parent
PHOTOS, CEILING, GOING_ON, WAITING = (
    FOLDER / "results" / f"{name}.json" for name in ("photos", "ceiling", "going_on", "waiting")
)
# what each reads
PEERS = {
    "torch_loader": "files",
    "webdataset": None,
    "litdata": "litdata",
    "streaming": "streaming",
}
OURS = ("surefoot_processes", "surefoot_threads", "surefoot_decoded")
CEILING_SHARE, DECODED_TIMES, GOING_S, WAITING_SHARE, EPOCH = 0.9, 15.0, 0.005, 0.02, 1.03
SETTINGS, TASKS = ("auto", "0", "1", "2"), ("decoded", "photos")
MEASURES = {"cpu_s_per_sample": "CPU time", "wall_s_per_sample": "time"}


def arms_of_photos(
    tars: Path, made: Path, names: Sequence[str] = (*OURS, "ceiling", *PEERS)
) -> list[Arm]:
    words = (sys.executable, "-m", "benchmarks.loaders.arms")
    return [
        Arm(
            name=name,
            command=(*words, name, str(tars), str(made), "{report}"),
            folder=ROOT,
            timeout_s=300,
        )
        for name in names
    ]


def arms_of_waiting(tars: Path, made: Path, tasks: Sequence[str]) -> list[Arm]:
    words = (sys.executable, "-m", "benchmarks.loaders.waiting")
    return [
        Arm(
            name=f"{what} {setting}",
            command=(*words, what, setting, str(tars), str(made), "{report}"),
            folder=ROOT,
            timeout_s=300,
        )
        for what in tasks
        for setting in SETTINGS
    ]


def render_photos(trial: Trial) -> str:
    """Every arm's cost of a sample, against that of surefoot's processes."""
    rows = [_row_of_photos(trial, arm) for arm in trial.arms]
    cpu, wall, mine = "cpu_s_per_sample", "wall_s_per_sample", "surefoot_processes"
    decoded = ratio_of(trial, "torch_loader", "surefoot_decoded", cpu)
    bars = [
        _bar(
            "samples per second, of the ceiling's",
            ratio_of(trial, "ceiling", mine, wall),
            CEILING_SHARE,
        ),
        _bar(
            "samples per CPU second, of the ceiling's",
            ratio_of(trial, "ceiling", mine, cpu),
            CEILING_SHARE,
        ),
    ]
    if "torch_loader" in trial.arms:
        bars += [
            _bar("ahead of every peer", _slowest_gain(trial), 1.0),
            _bar(
                "decoded once: samples per CPU second, times torch's that decodes each epoch",
                decoded,
                DECODED_TIMES,
            ),
        ]
    heads = (
        "arm",
        "samples per CPU second",
        "samples per second",
        "CPU time of a sample, of surefoot_processes'",
    )
    return "\n".join(
        (markdown(heads, rows), markdown(("share", "median (95 %)", "must", "standing"), bars))
    )


def _values(trial: Trial, arm: str, name: str) -> list[float]:
    return list(trial.by_round(arm, name).values())


def _row_of_photos(trial: Trial, arm: str) -> tuple[str, ...]:
    found = [_values(trial, arm, name) for name in MEASURES]
    told = [
        f"{median_interval([1 / each for each in values]).estimate:,.0f}" if values else "n/a"
        for values in found
    ]
    ratio = ratio_of(trial, arm, "surefoot_processes", "cpu_s_per_sample")
    return (arm, *told, "1" if arm == "surefoot_processes" else render_interval(ratio))


def _slowest_gain(trial: Trial) -> Interval | None:
    found = [
        each
        for peer in PEERS
        for name in MEASURES
        if (each := ratio_of(trial, peer, "surefoot_processes", name)) is not None
    ]
    return min(found, key=lambda each: each.estimate, default=None)


def _bar(what: str, found: Interval | None, least: float) -> tuple[str, str, str, str]:
    return what, render_interval(found), f">= {least:g}", standing_of(found, least=least)


def render_going_on(trial: Trial) -> str:
    """How soon the place of a batch is known, and whether it is the same batch."""
    found = {
        name: median_interval(_values(trial, "surefoot", name))
        for name in ("going_s", "going_p99_s", "same", "samples")
    }
    middle, slow, same = found["going_s"], found["going_p99_s"], found["same"]
    must = f"<= {format_seconds(GOING_S)}"
    rows = [
        ("the middle of 300 positions", _seconds(middle), must, standing_of(middle, most=GOING_S)),
        ("all but the slowest hundredth", _seconds(slow), must, standing_of(slow, most=GOING_S)),
        (
            "the same samples and the same pixels",
            format_percent(same.estimate),
            "100 %",
            standing_of(same, least=1.0),
        ),
    ]
    heads = (
        f"going on, of {found['samples'].estimate:,.0f} samples",
        "median (95 %)",
        "must",
        "standing",
    )
    return markdown(heads, rows)


def _seconds(found: Interval) -> str:
    low, high = (found.estimate if each is None else each for each in (found.low, found.high))
    return f"{format_seconds(found.estimate)} ({format_seconds(low)} to {format_seconds(high)})"


def render_waiting(trial: Trial) -> str:
    """Each setting's step and wait; auto against the best and the worst of those by hand."""
    rows, bars = [], []
    for what in TASKS:
        names = [
            arm
            for arm in trial.arms
            if arm.startswith(f"{what} ") and _values(trial, arm, "step_s")
        ]
        if not names:
            continue
        steps = {arm: median_interval(_values(trial, arm, "step_s")) for arm in names}
        waits = {arm: median_interval(_values(trial, arm, "waiting")) for arm in names}
        for arm in names:
            found = ", ".join(f"{each:g}" for each in sorted(set(_values(trial, arm, "workers"))))
            rows.append((arm, _seconds(steps[arm]), format_percent(waits[arm].estimate), found))
        by_hand = sorted(
            (arm for arm in names if not arm.endswith("auto")), key=lambda arm: steps[arm].estimate
        )
        wait, must = waits[f"{what} auto"], f"<= {format_percent(WAITING_SHARE)}"
        best, worst = (
            ratio_of(trial, f"{what} auto", arm, "step_s") for arm in (by_hand[0], by_hand[-1])
        )
        fastest, slowest = (each.split()[-1] for each in (by_hand[0], by_hand[-1]))
        bars += [
            (
                f"{what}: waiting",
                format_percent(wait.estimate),
                must,
                standing_of(wait, most=WAITING_SHARE),
            ),
            (
                f"{what}: against the best by hand, {fastest} workers",
                render_interval(best),
                f"<= {EPOCH}",
                standing_of(best, most=EPOCH),
            ),
            (
                f"{what}: against the worst by hand, {slowest} workers",
                render_interval(worst),
                "",
                "",
            ),
        ]
    heads = ("auto", "median (95 %)", "must", "standing")
    return "\n".join(
        (markdown(("setting", "a step", "waiting", "workers"), rows), markdown(heads, bars))
    )


def _measure_photos(tars: Path, rounds: int, out: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="surefoot-loaders-") as made:
        sets.write_files(tars, Path(made) / "files")
        for name, write in (("litdata", sets.write_litdata), ("streaming", sets.write_streaming)):
            try:
                write(tars, Path(made) / name)
            except ImportError as error:
                print(f"{name} is not here: {error}", file=sys.stderr)
        packages = (
            "torch",
            "numpy",
            "pillow",
            "webdataset",
            "litdata",
            "mosaicml-streaming",
            "surefoot",
        )
        measure(
            "JPEGs to batches",
            arms_of_photos(tars, Path(made)),
            rounds=rounds,
            packages=packages,
            out=out,
        )


def main() -> None:
    parser = make_parser(__doc__, PHOTOS)
    parser.add_argument("--only", choices=("photos", "ceiling", "going_on", "waiting"))
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS, help="of waiting")
    data = Path(os.environ.get("DATA", "../shared/data"))
    parser.add_argument("--data", type=Path, default=data, help="the folder of cifar10-webdataset")
    asked = parser.parse_args()
    tars = (ROOT / asked.data).resolve() / "cifar10-webdataset"
    if not asked.show:
        if asked.only in (None, "photos"):
            _measure_photos(tars, asked.rounds, PHOTOS)
        if asked.only in (None, "ceiling"):
            with tempfile.TemporaryDirectory(prefix="surefoot-loaders-") as made:
                measure(
                    "beside the ceiling alone",
                    arms_of_photos(tars, Path(made), ("surefoot_processes", "ceiling")),
                    rounds=asked.rounds,
                    packages=("torch", "numpy", "pillow", "surefoot"),
                    out=CEILING,
                )
        if asked.only in (None, "going_on"):
            command = (sys.executable, "-m", "benchmarks.loaders.going_on", str(tars), "{report}")
            arm = Arm(name="surefoot", command=command, folder=ROOT, timeout_s=600)
            measure(
                "going on",
                [arm],
                rounds=asked.rounds,
                packages=("torch", "numpy", "surefoot"),
                out=GOING_ON,
            )
        if asked.only in (None, "waiting"):
            with tempfile.TemporaryDirectory(prefix="surefoot-loaders-") as made:
                measure(
                    "waiting",
                    arms_of_waiting(tars, Path(made), asked.tasks),
                    rounds=asked.rounds,
                    packages=("torch", "surefoot"),
                    out=WAITING,
                )
    parts = {}
    renders = (
        (PHOTOS, "results", render_photos),
        (CEILING, "ceiling", render_photos),
        (GOING_ON, "going on", render_going_on),
        (WAITING, "waiting", render_waiting),
    )
    for path, name, render in renders:
        if path.is_file():
            trial = read_trial(path)
            parts[name] = render(trial)
            parts["conditions" if name == "results" else f"conditions of {name}"] = (
                render_conditions(trial)
            )
    show(parts, FOLDER / "README.md")


if __name__ == "__main__":
    main()
