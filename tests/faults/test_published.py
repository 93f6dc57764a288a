"""What benchmarks/faults says is what its raw results say, and every campaign of it is there."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from benchmarks.faults import run as faults
from surefoot.prove.campaigns.outcome import CampaignOutcome, Failure

README = Path(faults.__file__).with_name("README.md")
CLEAN = CampaignOutcome(
    case="F01", title="kill", seed=7, trials=500, counts={"inside a save": 260}, elapsed_s=60.0
)


def test_the_document_holds_the_tables_of_its_results() -> None:
    rows = faults.read_rows(faults.RESULTS)
    text = README.read_text(encoding="utf-8")
    for part in (
        faults.render_results(rows),
        faults.render_places(rows),
        faults.render_conditions(rows),
    ):
        assert part in text
    assert rows


def test_no_published_trial_failed() -> None:
    assert [row["case"] for row in faults.read_rows(faults.RESULTS) if row["failures"]] == []


def test_a_failure_is_published_with_its_seed_and_takes_the_bound_away() -> None:
    clean = json.loads(json.dumps(faults.as_row(CLEAN)))
    assert "| F01 | kill | 1, 3 | 500 | 0 | 0.600% | from 7 |" in faults.render_results([clean])
    failed = dataclasses.replace(CLEAN, failures=(Failure(case="F01", seed=9, what="lost"),))
    row = json.loads(json.dumps(faults.as_row(failed)))
    assert row["failures"] == [{"case": "F01", "seed": 9, "what": "lost"}]
    assert "| 500 | 1 | n/a | from 7 |" in faults.render_results([row])
