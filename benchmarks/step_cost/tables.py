"""Write the tables of README.md from the raw results beside it.

python benchmarks/step_cost/tables.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.measured import render_conditions, show
from surefoot.core.statistics import Interval, median_interval
from surefoot.core.units import format_number, format_seconds
from surefoot.trial import Bar, Effect, Trial, find_effect, format_measure, markdown, read_trial

FOLDER = Path(__file__).parent
RESULTS, PARITY = FOLDER / "results" / "step_cost.json", FOLDER / "results" / "parity.json"
MODELS = ("mlp", "convnet", "gpt")
PEERS = ("fabric", "accelerate", "lightning", "hf_trainer", "composer")
FLOORS = {"composer": "bare_for_composer"}  # under its own torch
CPU = "cpu_s_per_step"
RATIO_BARS = (  # (arm, baseline, bar of each model)
    ("surefoot", "idiomatic", {"mlp": 0.55, "convnet": 1.00, "gpt": 0.95}),
    ("surefoot", "fused", {"mlp": 0.75, "convnet": 1.0, "gpt": 1.0}),
    ("surefoot", "bare", {"convnet": 1.02, "gpt": 1.02}),
)
OWN_TIME_S = 40e-6  # surefoot's own time on the MLP, above the floor
SHARE_OF_PEERS = 0.25  # of the least that a peer adds on the MLP


def find_bars(trial: Trial) -> list[tuple[Bar, Effect]]:
    """Every bar that is a paired comparison of arms that the trial has, with its effect."""
    bars = [
        Bar(arm=arm, baseline=baseline, measure=f"{model}/{CPU}", most=most)
        for arm, baseline, limits in RATIO_BARS
        for model, most in limits.items()
    ]
    bars.append(
        Bar(
            arm="surefoot",
            baseline="bare",
            measure=f"mlp/{CPU}",
            most=OWN_TIME_S,
            kind="difference",
        )
    )
    there = [bar for bar in bars if {bar.arm, bar.baseline} <= set(trial.arms)]
    return [
        (bar, find_effect(trial, bar.arm, bar.baseline, bar.measure, bar.kind)) for bar in there
    ]


def find_share(trial: Trial) -> tuple[str, Interval] | None:
    """What surefoot adds on the MLP as a share of the least that a peer adds, by round.

    And the peer.
    """
    added = {
        peer: effect
        for peer in PEERS
        if (effect := _added(trial, peer, "mlp")) is not None and effect.interval
    }
    if not added:
        return None
    least = min(added, key=lambda peer: added[peer].interval.estimate)  # type: ignore[union-attr]
    mine, theirs = _differences(trial, "surefoot", "mlp"), _differences(trial, least, "mlp")
    shared = sorted(mine.keys() & theirs.keys())
    return least, median_interval(
        [mine[number] / theirs[number] for number in shared], neutral=SHARE_OF_PEERS
    )


def _added(trial: Trial, arm: str, model: str) -> Effect | None:
    floor = FLOORS.get(arm, "bare")
    return (
        find_effect(trial, arm, floor, f"{model}/{CPU}", "difference")
        if {arm, floor} <= set(trial.arms)
        else None
    )


def _differences(trial: Trial, arm: str, model: str) -> dict[int, float]:
    mine, floor = (
        trial.by_round(each, f"{model}/{CPU}") for each in (arm, FLOORS.get(arm, "bare"))
    )
    return {number: mine[number] - floor[number] for number in mine.keys() & floor.keys()}


def render_bars(trial: Trial) -> str:
    rows = []
    for bar, effect in find_bars(trial):
        most = format_number(bar.most) if bar.kind == "ratio" else format_seconds(bar.most)
        rows.append(
            (
                effect.measure.partition("/")[0],
                f"{bar.arm} against {bar.baseline}",
                _shown(effect),
                f"<= {most}",
                bar.standing(effect),
            )
        )
    share = find_share(trial)
    if share is not None:
        peer, interval = share
        row = Effect(arm="surefoot", baseline=peer, measure="share", interval=interval)
        standing = Bar(
            arm="surefoot", baseline=peer, measure="share", most=SHARE_OF_PEERS
        ).standing(row)
        rows.append(
            (
                "mlp",
                f"what surefoot adds, against what {peer} adds",
                _shown(row),
                f"<= {SHARE_OF_PEERS}",
                standing,
            )
        )
    return markdown(("model", "CPU time of a step", "median (95 %)", "bar", "verdict"), rows)


def render_arms(trial: Trial) -> str:
    """CPU time of a step of each arm, and what it adds to its floor."""
    rows = []
    for arm in trial.arms:
        cells = [arm]
        for model in MODELS:
            values = list(trial.by_round(arm, f"{model}/{CPU}").values())
            cells.append(f"{format_seconds(median_interval(values).estimate)}" if values else "n/a")
            effect = _added(trial, arm, model)
            cells.append(
                _added_words(effect)
                if effect is not None and arm not in ("bare", "bare_for_composer")
                else ""
            )
        rows.append(cells)
    header = ["arm", *(cell for model in MODELS for cell in (model, "added"))]
    return markdown(header, rows)


def _added_words(effect: Effect) -> str:
    if effect.interval is None:
        return "not measured"
    shown = _shown(effect)
    return (
        f"no effect {shown[shown.index('(') :]}"
        if effect.interval.verdict == "no effect"
        else shown
    )


def _shown(effect: Effect) -> str:
    interval = effect.interval
    if interval is None:
        return "n/a"
    values = (interval.estimate, interval.low, interval.high)
    middle, low, high = (
        format_number(v) if effect.kind == "ratio" else format_measure(effect.measure, v)
        for v in values
    )
    return f"{middle} ({low} to {high})"


def render_parity(found: dict[str, Any]) -> str:
    """The worst tensor of each group, and the losses further on, each with its floor."""
    tensors = [
        (
            row["model"],
            f"{row['what']}, step {row['step']}",
            str(row["tensors"]),
            format_number(row["distance"]),
            format_number(row["floor"]),
            "" if row["bar"] is None else f"<= {row['bar']:g}",
            row["verdict"],
        )
        for row in found["tensors"]
    ]
    losses = [
        (
            row["model"],
            f"{row['step']:,}",
            f"{row['reference']:.5f}",
            f"{row['candidate']:.5f}",
            format_number(row["difference"]),
            format_number(row["floor"]),
            _loss_verdict(row),
            (
                f"{format_number(row['difference_of_this_step'])} "
                f"({format_number(row['floor_of_this_step'])})"
            ),
        )
        for row in found["losses"]
    ]
    first = markdown(
        ("model", "what", "tensors", "largest distance", "two equal runs", "bar", "verdict"),
        tensors,
    )
    header = (
        "model",
        "step",
        "idiomatic",
        "surefoot",
        "difference",
        "fused against idiomatic",
        "bar 0.001",
        "that step alone (fused)",
    )
    return f"{first}\n{markdown(header, losses)}" if losses else first


def _loss_verdict(row: dict[str, Any]) -> str:
    return "" if row["bar"] is None else "holds" if row["difference"] <= row["bar"] else "fails"


def main(results: Path = RESULTS, *, in_readme: bool = True) -> None:
    """Make the tables of `results`; those of parity too where they have been measured."""
    trial = read_trial(results)
    parts = {
        "bars": render_bars(trial),
        "arms": render_arms(trial),
        "conditions": render_conditions(trial),
    }
    if in_readme and PARITY.is_file():
        parts["parity"] = render_parity(json.loads(PARITY.read_text()))
    show(parts, FOLDER / "README.md" if in_readme else None)


if __name__ == "__main__":
    main()
