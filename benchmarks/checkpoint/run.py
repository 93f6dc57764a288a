"""What saving and loading cost.

Bandwidth beside others, the time that training loses, bytes and microseconds of the small things.

python benchmarks/checkpoint/run.py [--rounds 4] [--sizes 400,2000] [--folder DIR]

The disk of DIR is what is measured.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from benchmarks.measured import ROOT, make_parser, measure, render_conditions, show
from surefoot.core.statistics import median, paired_ratio
from surefoot.core.units import format_number
from surefoot.trial import Arm, Trial, markdown, read_trial

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results" / "checkpoint.json"
# another machine, whose processor has instructions for SHA-256
OTHER = RESULTS.with_name("with_sha.json")
WAYS = ("raw", "surefoot", "torch_save", "safetensors", "dcp")
STALLS = {"one core": 1, "both cores": 2}
STALL_MODES = {
    "blocking": "surefoot, blocking",
    "background": "surefoot",
    "torch_save": "torch.save and fsync",
    "dcp_async": "DCP async_save",
}
STALL_ROUNDS = 3
MIN_SHARE = 0.9
MAX_LOST = {"one core": 0.02, "both cores": 0.15}


def make_arm(name: str, folder: Path, *words: str) -> Arm:
    command = (
        sys.executable,
        "-m",
        "benchmarks.checkpoint.arms",
        *words,
        "{report}",
        str(folder / "state"),
    )
    return Arm(name=name, command=command, folder=ROOT, timeout_s=900.0)


def make_stall_arms(folder: Path) -> list[Arm]:
    return [
        Arm(
            name=f"{mode} {cores}",
            folder=ROOT,
            timeout_s=1800.0,
            command=(
                sys.executable,
                "-m",
                "benchmarks.checkpoint.arms",
                "stall",
                mode,
                str(threads),
                "{report}",
                str(folder / "state"),
            ),
        )
        for cores, threads in STALLS.items()
        for mode in STALL_MODES
    ]


def render(trial: Trial) -> str:
    """Bandwidths and their shares of what the disk and the cores allow, and the bars."""
    sizes = sorted({int(arm.rsplit("_", 1)[1]) for arm in trial.arms if arm.startswith("raw_")})
    rows, bars = [], []
    for size in sizes:
        for measure_name, what in (("save_s", "save"), ("load_s", "load and verify")):
            raw = trial.by_round(f"raw_{size}", measure_name)
            for way in WAYS:
                taken = trial.by_round(f"{way}_{size}", measure_name)
                if not taken:
                    continue
                ratio = paired_ratio(
                    [raw[r] for r in taken if r in raw], [taken[r] for r in taken if r in raw]
                )
                rows.append(
                    (
                        f"{size} MB",
                        what,
                        way,
                        f"{size / 1000 / median(list(taken.values())):.2f} GB/s",
                        str(ratio),
                    )
                )
                if way == "surefoot":
                    bars.append(
                        (
                            f"{what}, {size} MB: share of the bandwidth",
                            f"{ratio.estimate:.3g}",
                            f">= {MIN_SHARE}",
                            _verdict(ratio.estimate >= MIN_SHARE),
                        )
                    )
    table = markdown(("state", "", "way", "bandwidth", "share of raw"), rows)
    return f"{table}\n{markdown(('bar', 'measured', 'must', 'verdict'), bars)}"


SMALL = {
    "ledger_bytes_per_step": ("ledger, bytes a step", 16.0),
    "ledger_us_per_step": ("ledger, CPU us a step", 10.0),
    "cursor_50000_ms": ("seek to any step of 50,000 samples, ms", 1.0),
    "cursor_10000000_ms": ("the same of 10 million, ms", 1.0),
    "incremental_share": ("incremental save, bytes written over bytes of changed tensors", 1.05),
}


def render_small(trial: Trial) -> str:
    found = {name: median(list(trial.by_round("small", name).values())) for name in SMALL}
    rows = [
        (text, format_number(found[name]), f"<= {most:g}", _verdict(found[name] <= most))
        for name, (text, most) in SMALL.items()
    ]
    return markdown(("bar", "measured", "must", "verdict"), rows)


def render_stall(trial: Trial) -> str:
    rows = []
    for cores in STALLS:
        found = {
            name: {
                mode: median(list(of.values()))
                for mode in STALL_MODES
                if (of := trial.by_round(f"{mode} {cores}", name))
            }
            for name in ("extra_s", "ordinary_s", "touched", "waited_s")
        }
        blocking = found["extra_s"].get("blocking")
        for mode, lost in found["extra_s"].items():
            share = "" if blocking is None else f"{lost / blocking:.1%}"
            bar = ("", "")
            if mode == "background" and blocking is not None:
                bar = (f"<= {MAX_LOST[cores]:.0%}", _verdict(lost <= MAX_LOST[cores] * blocking))
            step, touched = (
                f"{found['ordinary_s'][mode] * 1e3:.0f} ms",
                f"{found['touched'][mode]:.1f}",
            )
            waited = f"{found['waited_s'][mode] * 1e3:.1f} ms" if mode in found["waited_s"] else ""
            rows.append(
                (
                    cores,
                    STALL_MODES[mode],
                    step,
                    touched,
                    waited,
                    f"{lost * 1e3:.1f} ms",
                    share,
                    *bar,
                )
            )
    return markdown(
        (
            "training on",
            "save",
            "a step",
            "steps touched",
            "stands still",
            "adds",
            "share of blocking",
            "must",
            "verdict",
        ),
        rows,
    )


def _verdict(holds: bool) -> str:
    return "holds" if holds else "fails"


def main() -> None:
    parser = make_parser(__doc__, RESULTS)
    parser.set_defaults(rounds=4)
    parser.add_argument("--sizes", default="400,2000", help="megabytes")
    parser.add_argument(
        "--part",
        choices=("saves", "small", "stall"),
        help="measure this alone; the rest stays as it is",
    )
    parser.add_argument(
        "--folder", type=Path, help="where the states are written; a new one by default"
    )
    asked = parser.parse_args()
    stalls, small = (
        asked.out.with_name(f"{asked.out.stem}_{name}.json") for name in ("stall", "small")
    )
    if not asked.show:
        wanted = ("saves", "small", "stall") if asked.part is None else (asked.part,)
        with tempfile.TemporaryDirectory(dir=asked.folder) as made:
            folder, packages = Path(made), ("torch", "numpy", "surefoot")
            if "saves" in wanted:
                sizes = asked.sizes.split(",")
                arms = [
                    make_arm(f"{way}_{size}", folder, "save", way, size)
                    for size in sizes
                    for way in WAYS
                ]
                measure("checkpoint", arms, rounds=asked.rounds, packages=packages, out=asked.out)
            if "small" in wanted:
                arms = [make_arm("small", folder, "small", "-", "0")]
                measure("small things", arms, rounds=asked.rounds, packages=packages, out=small)
            if "stall" in wanted:
                measure(
                    "stall",
                    make_stall_arms(folder),
                    rounds=STALL_ROUNDS,
                    warmup_rounds=0,
                    packages=packages,
                    out=stalls,
                )
    if asked.out != RESULTS:
        return  # one part of another machine, to be put beside the others
    trial = read_trial(asked.out)
    parts = {
        "conditions": render_conditions(trial),
        "results": render(trial),
        "stall": render_stall(read_trial(stalls)),
        "small": render_small(read_trial(small)),
        "other": render(read_trial(OTHER)),
        "other stall": render_stall(read_trial(OTHER.with_name(f"{OTHER.stem}_stall.json"))),
    }
    show(parts, FOLDER / "README.md")


if __name__ == "__main__":
    main()
