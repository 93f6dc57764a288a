"""Counts by hand, and the roofline as arithmetic."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from surefoot.core.cost import shape
from surefoot.core.cost.roofline import (
    OperatorWork,
    Utilization,
    attainable_flops_per_s,
    find_point,
    fusible_share,
    read_utilization,
    ridge,
)
from surefoot.core.hardware import Peaks, find_published

PEAKS = Peaks(
    device="a",
    threads=1,
    flops_per_s={"fp32": 100e9, "bf16": 400e9},
    bytes_per_s=10e9,
    source="measured here",
)


def work(operator: str = "mm", group: str = "product", **more: float | str) -> OperatorWork:
    row = {
        "dtype": "fp32",
        "calls": 1,
        "flops": 0.0,
        "model_flops": 0.0,
        "num_bytes": 0.0,
        "elapsed_s": 1.0,
        **more,
    }
    return OperatorWork(operator=operator, group=group, **row)  # type: ignore[arg-type]


def test_the_roof_rises_with_the_intensity_up_to_the_ridge() -> None:
    at = ridge(100e9, 10e9)
    assert at == 10
    assert [attainable_flops_per_s(each, 100e9, 10e9) for each in (at / 2, at, 2 * at)] == [
        50e9,
        100e9,
        100e9,
    ]


def test_a_product_is_held_back_by_compute_and_a_sum_by_memory() -> None:
    product = find_point("mm", "operator", [work(flops=2e9, num_bytes=12e6)], PEAKS)
    added = find_point(
        "add", "operator", [work("add", "pointwise", flops=1e6, num_bytes=12e6)], PEAKS
    )
    assert (product.bound, product.least_s) == ("compute", 2e9 / 100e9)
    assert (added.bound, added.least_s) == ("memory", 12e6 / 10e9)
    assert product.share_of_roof == pytest.approx(0.02)


def test_a_module_adds_up_what_its_operators_need_each_on_the_peak_of_its_dtype() -> None:
    parts = [
        work(flops=2e9, num_bytes=12e6),
        work(flops=4e9, num_bytes=12e6, dtype="bf16"),
        work("add", "pointwise", num_bytes=5e8),
    ]
    point = find_point("block", "module", parts, PEAKS)
    assert point.least_s == pytest.approx(2e9 / 100e9 + 4e9 / 400e9 + 5e8 / 10e9)
    assert (point.bound, point.dtype, point.group) == ("memory", None, None)


def test_without_a_peak_nothing_is_said() -> None:
    unknown = Peaks(device="b", threads=None, flops_per_s={}, bytes_per_s=None, source="nobody")
    point = find_point("mm", "operator", [work(flops=2e9, num_bytes=12e6)], unknown)
    assert (point.bound, point.least_s, point.share_of_roof) == (None, None, None)
    assert fusible_share([point]) is None
    use = Utilization(flops_per_sample=1e9, peak_flops_per_s=None, dtype="fp32", source="nobody")
    assert use.share(10.0) is None
    assert use.words(10.0).startswith("n/a = 1 GFLOP a sample x 10 samples/s / n/a GFLOP/s")


def test_fusion_helps_what_memory_holds_back_and_is_no_product() -> None:
    points = [
        find_point("mm", "operator", [work(flops=2e9, num_bytes=12e6, elapsed_s=6.0)], PEAKS),
        find_point("thin mm", "operator", [work(flops=1e3, num_bytes=12e6, elapsed_s=1.0)], PEAKS),
        find_point(
            "add",
            "operator",
            [work("add", "pointwise", flops=1e3, num_bytes=12e6, elapsed_s=2.0)],
            PEAKS,
        ),
        find_point(
            "norm",
            "operator",
            [work("norm", "normalization", flops=1e3, num_bytes=12e6, elapsed_s=1.0)],
            PEAKS,
        ),
        find_point(
            "block", "module", [work("add", "pointwise", num_bytes=12e6, elapsed_s=99.0)], PEAKS
        ),
    ]
    assert fusible_share(points) == pytest.approx(3 / 10)


def test_utilization_is_what_its_formula_says() -> None:
    use = Utilization(
        flops_per_sample=3e9, peak_flops_per_s=600e9, dtype="fp32", source="measured here, 1 thread"
    )
    assert use.share(50.0) == pytest.approx(0.25)
    assert (
        use.words(50.0)
        == "25 % = 3 GFLOP a sample x 50 samples/s / 600 GFLOP/s (fp32, measured here, 1 thread)"
    )


GOOD = {
    "flops_per_sample": 2.0,
    "peak_flops_per_s": 4.0,
    "dtype": "fp32",
    "source": "measured here",
}


def test_a_file_that_is_none_or_of_another_version_says_nothing_of_utilization() -> None:
    for key in ("utilization", "utilisation"):  # the previous release wrote the second
        assert read_utilization(json.dumps({"version": 1, key: GOOD})) == Utilization(**GOOD)  # type: ignore[arg-type]
    hostile = [
        "",
        "[]",
        "{}",
        "[" * 5000,
        json.dumps({"version": 2, "utilization": GOOD}),
        json.dumps({"version": 1, "utilization": 3}),
    ]
    assert [read_utilization(text) for text in hostile] == [None] * len(hostile)


def test_a_gpu_that_is_not_in_the_table_is_unknown_and_one_that_is_has_its_source_and_date() -> (
    None
):
    known = find_published("NVIDIA A100-SXM4-80GB")
    assert known is not None
    assert (known.flops_per_s["bf16"], known.bytes_per_s) == (312e12, 2039e9)
    assert "datasheet" in known.source
    assert "20" in known.source
    assert [find_published(name) for name in ("NVIDIA A100", "NVIDIA Z9", "")] == [None] * 3


def test_causal_attention_counts_each_query_with_the_keys_up_to_it() -> None:
    seen = [
        [shape.attention_pairs(q, k, causal=True), sum(min(i + 1, k) for i in range(q))]
        for q in range(1, 9)
        for k in range(1, 9)
    ]
    assert all(mine == theirs for mine, theirs in seen)


def test_the_rule_of_thumb_is_six_a_parameter_and_token_and_twelve_a_pair_and_width() -> None:
    assert (
        shape.transformer_flops(10, tokens=16, layers=2, width=4, length=8, causal=False)
        == 6 * 10 * 16 + 12 * 2 * 4 * 2 * 64
    )


def test_the_arithmetic_imports_neither_torch_nor_numpy() -> None:
    script = (
        "import sys, surefoot.core.cost.roofline, surefoot.core.cost.shape; "
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], check=False, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
