"""Tests of values of a different kind in a spec.

The hint is in the words of TOML, and of torch for number formats.
"""

from __future__ import annotations

from typing import Any

import pytest

from surefoot.contract.spec import RunSpec
from surefoot.core.errors import SpecError


@pytest.mark.parametrize(
    ("tables", "hint"),
    [
        ({"precision": {"compute": "bfloat16"}}, "did you mean 'bf16'?"),
        ({"precision": {"compute": "torch.float16"}}, "did you mean 'fp16'?"),
        ({"precision": {"compute": "float32"}}, "did you mean 'fp32'?"),
        ({"precision": {"compute": "bf61"}}, "did you mean 'bf16'?"),
        ({"schedule": {"warmup": 500}}, 'a number with its unit in quotes: "500 steps"'),
        ({"schedule": {"sequence": 3}}, "it should be a valid array"),
        ({"schedule": {"sequence": "linear"}}, "it should be a valid array"),
        ({"optim": {"betas": 0.9}}, "it should be an array, in brackets"),
    ],
)
def test_a_value_of_another_kind_is_answered_in_the_words_of_toml_and_of_torch(
    tables: dict[str, Any], hint: str
) -> None:
    with pytest.raises(SpecError) as caught:
        RunSpec.model_validate(tables)
    assert hint in str(caught.value.hint)
