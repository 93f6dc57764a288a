"""What every benchmark's `run.py` does alike.

Its flags, the interleaved run with its conditions, the tables of its README.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from surefoot.core.statistics import Interval, mean, mean_difference, paired_ratio
from surefoot.core.units import format_number, format_seconds
from surefoot.trial import Arm, Effect, Trial, find_conditions, markdown, run_rounds, write_trial

ROOT = Path(__file__).resolve().parents[1]
ROUNDS = 15


def make_parser(description: str | None, results: Path) -> argparse.ArgumentParser:
    """The flags of every benchmark: --rounds, --out and --show."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument(
        "--out", type=Path, default=results, help="where the raw outcomes go, as JSON"
    )
    parser.add_argument(
        "--show", action="store_true", help="only make the tables from the results that are there"
    )
    return parser


def make_checkouts_parser(description: str | None, results: Path) -> argparse.ArgumentParser:
    """The arguments of a comparison of two checkouts: OLD, NEW and --out."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", type=Path, nargs="?", help="a checkout of the state before")
    parser.add_argument(
        "new",
        type=Path,
        nargs="?",
        default=ROOT,
        help="a checkout of the state after; this one, if none is given",
    )
    parser.add_argument("--out", type=Path, default=results)
    return parser


def find_checkouts_conditions(old: Path, new: Path) -> dict[str, str]:
    """The conditions of a comparison, with the commit of each checkout."""
    return {
        **find_conditions(("torch", "numpy")),
        "old": _commit_of(old),
        "new": _commit_of(new),
    }


def _commit_of(checkout: Path) -> str:
    words = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=7"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


def measure(
    title: str,
    arms: Sequence[Arm],
    *,
    rounds: int,
    packages: Sequence[str],
    out: Path,
    said: Mapping[str, str] | None = None,
    warmup_rounds: int = 1,
) -> Trial:
    """Run the arms interleaved, say on stderr how far it is, and write the trial to `out`.

    The first `warmup_rounds` do not count.

    `said` are conditions that only the benchmark knows.
    """
    conditions = {
        **find_conditions(packages),
        **(said or {}),
        "load when begun": f"{os.getloadavg()[0]:.2f}",
    }
    outcomes = []
    for outcome in run_rounds(arms, rounds=rounds, warmup_rounds=warmup_rounds):
        outcomes.append(outcome)
        where = "warm-up" if outcome.is_warmup else f"round {outcome.round + 1} of {rounds}"
        told = outcome.error or f"{format_seconds(outcome.measures['process_cpu_s'])} of CPU time"
        print(
            f"{title}: {where}: {outcome.arm}: {outcome.ended}, {told}", file=sys.stderr, flush=True
        )
    conditions["load when done"] = f"{os.getloadavg()[0]:.2f}"
    names = tuple(arm.name for arm in arms)
    trial = Trial(
        title=title,
        arms=names,
        rounds=rounds,
        seed=0,
        conditions=conditions,
        outcomes=tuple(outcomes),
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    write_trial(trial, out)
    return trial


def render_conditions(trial: Trial) -> str:
    """The trial's conditions, the rounds of arms that ended well, and how others failed."""
    done = {
        arm: sum(o.arm == arm and o.ended == "done" and not o.is_warmup for o in trial.outcomes)
        for arm in trial.arms
    }
    rounds = ", ".join(f"{arm} {count}" for arm, count in done.items())
    failures = [
        (f"failure of {arm}", text.splitlines()[0])
        for arm in trial.arms
        if (text := trial.failure(arm))
    ]
    return markdown(
        ("condition", "value"), [*trial.conditions.items(), ("rounds", rounds), *failures]
    )


def render_scores(
    trial: Trial,
    kinds: Sequence[str],
    *,
    heads: tuple[str, str, str],
    most_worse: float,
    factor: float = 1.0,
) -> str:
    """The mean score of each kind over arms `KIND seed N`, and how far it is from the first one's.

    Both have the same seeds.

    A kind holds where its mean is at most `most_worse` below that one, scores times `factor`; with
    a negative factor less is better.
    """
    scores: dict[str, dict[str, float]] = {kind: {} for kind in kinds}
    for outcome in trial.outcomes:
        kind, _, seed = outcome.arm.partition(" seed ")
        if "score" in outcome.measures:
            scores[kind][seed] = abs(factor) * outcome.measures["score"]
    rows, base = [], scores[kinds[0]]
    for kind, mine in scores.items():
        both = sorted(mine.keys() & base.keys())
        if not both:
            rows.append((kind, "n/a", "0", "", "not measured"))
            continue
        average = mean([mine[seed] for seed in both])
        apart = mean_difference(
            [mine[seed] for seed in both], [base[seed] for seed in both], paired=True
        )
        worse = -apart.estimate if factor > 0 else apart.estimate
        verdict = "" if kind == kinds[0] else "holds" if worse <= most_worse else "fails"
        rows.append(
            (
                kind,
                format_number(average),
                str(len(both)),
                "" if kind == kinds[0] else str(apart),
                verdict,
            )
        )
    return markdown(("run", heads[0], "seeds", heads[1], heads[2]), rows)


def render_ratio(effect: Effect) -> str:
    """An effect's estimate with its interval; n/a where no pair has both."""
    found = effect.interval
    if found is None:
        return "n/a"
    estimate, low, high = map(format_number, (found.estimate, found.low, found.high))
    return f"{estimate} ({low} to {high})"


def ratio_of(trial: Trial, arm: str, baseline: str, name: str) -> Interval | None:
    """What `arm` takes over what `baseline` takes, round by round; None where no round has both."""
    one, other = trial.by_round(arm, name), trial.by_round(baseline, name)
    rounds = [number for number in one if number in other]
    return (
        paired_ratio([one[number] for number in rounds], [other[number] for number in rounds])
        if rounds
        else None
    )


def render_interval(found: Interval | None, form: str = ".3g", factor: float = 1.0) -> str:
    """`0.964 (0.782 to 1.05)`."""
    if found is None:
        return "n/a"
    low, middle, high = (each * factor for each in _ends(found))
    return f"{middle:{form}} ({low:{form}} to {high:{form}})"


def standing_of(
    found: Interval | None, *, least: float | None = None, most: float | None = None
) -> str:
    """Whether an interval lies within a bar, without it, or on both sides."""
    if found is None:
        return "not measured"
    low, _, high = _ends(found)
    if (least is None or low >= least) and (most is None or high <= most):
        return "holds"
    return (
        "missed"
        if (least is not None and high < least) or (most is not None and low > most)
        else "undecided"
    )


def _ends(found: Interval) -> tuple[float, float, float]:
    low, high = (found.estimate if each is None else each for each in (found.low, found.high))
    return low, found.estimate, high


def show(parts: Mapping[str, str], readme: Path | None) -> None:
    """Print the tables and put each into `readme`, where one is given.

    There it stands between its marks `<!-- name -->` and `<!-- /name -->`.
    """
    print("\n".join(parts.values()))
    if readme is not None and readme.is_file():
        readme.write_text(replace_parts(readme.read_text(), parts))


def replace_parts(text: str, parts: Mapping[str, str]) -> str:
    """`text` with what stands between the marks of each part replaced.

    One without marks is left out.

    >>> replace_parts("<!-- a -->\\nold\\n<!-- /a -->", {"a": "new\\n", "b": "x"})
    '<!-- a -->\\nnew\\n<!-- /a -->'
    """
    for name, part in parts.items():
        before, opening, rest = text.partition(f"<!-- {name} -->\n")
        _, closing, after = rest.partition(f"<!-- /{name} -->")
        text = f"{before}{opening}{part}{closing}{after}" if closing else text
    return text
