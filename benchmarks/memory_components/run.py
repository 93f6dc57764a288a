"""What the memory components save and what they cost.

The chunked head, recomputation of a deep model, AdamW with moments in 8 bits.

python benchmarks/memory_components/run.py [--only cost|again|reference|score] [--rounds 15]
                                           [--seeds 5] [--show]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.measured import ROOT, make_parser, measure, render_conditions, render_scores, show
from surefoot.contract import spec_file
from surefoot.contract.spec import RunSpec
from surefoot.core.units import format_number, format_percent
from surefoot.trial import (
    Arm,
    Bar,
    Trial,
    effects_markdown,
    find_effect,
    find_effects,
    markdown,
    read_trial,
)

FOLDER = Path(__file__).parent
NAMES = ("memory_components", "again", "reference", "score")
RESULTS, AGAIN, REFERENCE, SCORES = (FOLDER / "results" / f"{name}.json" for name in NAMES)
ARMS = (
    "head plain",
    "head chunked",
    "deep none",
    "deep full",
    "deep every2",
    "deep operators",
    "state fp32",
    "state 8bit",
)
PAIRS = (
    ("head chunked", "head plain"),
    ("deep full", "deep none"),
    ("deep every2", "deep none"),
    ("deep operators", "deep none"),
)
MEASURES = ("peak_bytes", "cpu_s_per_step")
AGAIN_ARMS = ("deep none", "deep operators")  # what the noise had left undecided, once more
REFERENCE_ARMS = ("reference none", "reference full", "reference operators")
REFERENCE_ROUNDS = 3  # allocations repeat, and a round takes a quarter of an hour
STATE = ("state 8bit", "state fp32")
BARS = (
    ("head chunked", "head plain", "peak_bytes", 0.25),
    ("head chunked", "head plain", "cpu_s_per_step", 1.15),
    ("deep full", "deep none", "peak_bytes", 0.35),
    ("deep full", "deep none", "cpu_s_per_step", 1.40),
    ("deep operators", "deep none", "cpu_s_per_step", 1.10),
    (*STATE, "state_bytes", 0.27),
)
MIN_SHARE = 0.60  # of the saving of full recomputation that the selective one has
STATES, SEEDS, MAX_WORSE = ("fp32", "8bit"), 5, 0.02  # bits per byte


def make_arms(names: Sequence[str] = ARMS) -> list[Arm]:
    """Each a process of its own: nothing that another one left raises its peak."""
    module = "benchmarks.memory_components.arms"
    return [
        Arm(
            name=name,
            command=(sys.executable, "-m", module, name, "{report}"),
            folder=ROOT,
            timeout_s=3600,
        )
        for name in names
    ]


def make_spec(state: str, seed: int) -> RunSpec:
    """A small language model for a million bytes with AdamW: the same but for its moments."""
    return RunSpec(
        task={"use": "pycorpus", "layers": 4, "width": 128, "heads": 4, "length": 128},
        optim={"name": "adamw", "lr": 0.002, "betas": [0.9, 0.95], "state": state},
        schedule={"name": "linear", "warmup": "20 steps"},
        train={"length": "1 M tokens", "batch": 16, "seed": seed},
        evaluate={"split": "heldout", "every": "1 M tokens", "batch": 64},
        checkpoint={"every": "1 h"},
    )


def score_arms(seeds: int) -> list[Arm]:
    words = (
        sys.executable,
        "-m",
        "benchmarks.large_batch.arms",
        "score",
        "{work}/spec.toml",
        "{work}/run",
        "{report}",
    )
    return [
        Arm(
            name=f"{state} seed {seed}",
            command=words,
            folder=ROOT,
            timeout_s=3600,
            files={"spec.toml": spec_file.write(make_spec(state, seed))},
        )
        for seed in range(seeds)
        for state in STATES
    ]


def render(trial: Trial) -> str:
    """Each arm against the plain one, then the bars."""
    effects = [
        find_effect(trial, arm, baseline, name) for arm, baseline in PAIRS for name in MEASURES
    ]
    effects += [find_effect(trial, *STATE, name) for name in ("state_bytes", *MEASURES)]
    rows = []
    for arm, baseline, name, most in BARS:
        effect = find_effect(trial, arm, baseline, name)
        bar = Bar(arm=arm, baseline=baseline, measure=name, most=most)
        rows.append((f"{arm} / {baseline}", name, f"<= {most}", bar.standing(effect)))
    share = find_share(trial)
    verdict = "n/a" if share is None else "holds" if share >= MIN_SHARE else "fails"
    rows.append(
        (
            "share of full's saving, deep operators",
            f"peak_bytes: {format_percent(share)}",
            f">= {format_number(MIN_SHARE)}",
            verdict,
        )
    )
    return f"{effects_markdown(effects)}\n{markdown(('arms', 'measure', 'bar', 'verdict'), rows)}"


def render_again(trial: Trial) -> str:
    """The selective way against none by itself, and its bar."""
    plain, selective = AGAIN_ARMS
    effects = [find_effect(trial, selective, plain, name) for name in MEASURES]
    bar = Bar(arm=selective, baseline=plain, measure="cpu_s_per_step", most=1.10)
    row = (f"{selective} / {plain}", bar.measure, f"<= {bar.most}", bar.standing(effects[-1]))
    return f"{effects_markdown(effects)}\n{markdown(('arms', 'measure', 'bar', 'verdict'), [row])}"


def render_reference(trial: Trial) -> str:
    """Each way to recompute against none: what the step holds, the whole process, and time."""
    measures = ("peak_bytes", "process_peak_bytes", "cpu_s_per_step")
    return effects_markdown(find_effects(trial, REFERENCE_ARMS[0], measures))


def find_share(trial: Trial) -> float | None:
    """How much of what full recomputation saves the selective one does.

    Allocations repeat, so one round says it.
    """
    found = [
        list(trial.by_round(arm, "peak_bytes").values())
        for arm in ("deep none", "deep full", "deep operators")
    ]
    if not all(found):
        return None
    none, full, operators = (values[0] for values in found)
    return (none - operators) / (none - full)


def render_score(trial: Trial) -> str:
    """The mean score with moments of either kind, their difference by seed, and the bar."""
    heads = ("mean bits per byte", "above moments in fp32", f"means within {MAX_WORSE}")
    return render_scores(trial, STATES, heads=heads, most_worse=MAX_WORSE, factor=-1)


def main() -> None:
    parser = make_parser(__doc__, RESULTS)
    parser.add_argument("--only", choices=("cost", "again", "reference", "score"))
    parser.add_argument("--seeds", type=int, default=SEEDS)
    asked = parser.parse_args()
    packages = ("torch", "torchao", "surefoot")
    again, reference, scores = (
        asked.out.with_name(each.name) for each in (AGAIN, REFERENCE, SCORES)
    )
    asked_for = (
        () if asked.show else (asked.only,) if asked.only else ("cost", "reference", "score")
    )
    if "cost" in asked_for:
        measure(
            "memory components", make_arms(), rounds=asked.rounds, packages=packages, out=asked.out
        )
    if "again" in asked_for:
        measure(
            "memory components: again",
            make_arms(AGAIN_ARMS),
            rounds=asked.rounds,
            packages=packages,
            out=again,
        )
    if "reference" in asked_for:
        rounds = min(asked.rounds, REFERENCE_ROUNDS)
        arms = make_arms(REFERENCE_ARMS)
        measure(
            "memory components: reference",
            arms,
            rounds=rounds,
            packages=packages,
            out=reference,
            warmup_rounds=0,
        )
    if "score" in asked_for:
        measure(
            "memory components: score",
            score_arms(asked.seeds),
            rounds=1,
            packages=packages,
            out=scores,
            warmup_rounds=0,
        )
    parts = {}
    if asked.out.is_file():
        trial = read_trial(asked.out)
        parts |= {"conditions": render_conditions(trial), "results": render(trial)}
    if again.is_file():
        trial = read_trial(again)
        parts |= {"again conditions": render_conditions(trial), "again": render_again(trial)}
    if reference.is_file():
        trial = read_trial(reference)
        parts |= {
            "reference conditions": render_conditions(trial),
            "reference": render_reference(trial),
        }
    if scores.is_file():
        trial = read_trial(scores)
        parts |= {"score conditions": render_conditions(trial), "score": render_score(trial)}
    show(parts, FOLDER / "README.md" if asked.out == RESULTS else None)


if __name__ == "__main__":
    main()
