"""What NCCL is told: each key under the name that NCCL has for it.

Misspelt variables are refused, and what holds is written down.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from surefoot.contract import events
from surefoot.contract.spec import NcclTable, RunSpec
from surefoot.core.errors import InputError, SpecError
from surefoot.runtime.comm import nccl
from tests.world.ranks import run_ranks
from tests.world.test_run import spec, train

ALL: dict[str, Any] = {
    "debug": "warn",
    "interface": "=eth0",
    "infiniband": True,
    "adapter": "mlx5_0",
    "infiniband_timeout": 20,
    "infiniband_retries": 7,
    "algorithm": ("ring", "nvlstree"),
    "protocol": ("simple",),
    "peer_access": False,
}
SET = {
    "NCCL_DEBUG": "WARN",
    "NCCL_SOCKET_IFNAME": "=eth0",
    "NCCL_IB_DISABLE": "0",
    "NCCL_IB_HCA": "mlx5_0",
    "NCCL_IB_TIMEOUT": "20",
    "NCCL_IB_RETRY_CNT": "7",
    "NCCL_ALGO": "ring,nvlstree",
    "NCCL_PROTO": "simple",
    "NCCL_P2P_DISABLE": "1",
}


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in [name for name in os.environ if name.startswith("NCCL_")]:
        monkeypatch.delenv(name)
    return monkeypatch


def test_every_key_has_its_variable_and_nothing_is_set_that_was_not_asked_for() -> None:
    assert set(ALL) == set(NcclTable.model_fields)
    assert nccl.variables(NcclTable(**ALL)) == SET
    assert nccl.variables(NcclTable()) == {}
    assert {name.removeprefix("NCCL_") for name in SET} <= nccl.NAMES


def test_where_it_joins_gpus_the_table_wins_over_the_environment_says_so_and_is_put_back(
    plain: pytest.MonkeyPatch,
) -> None:
    plain.setenv("NCCL_ALGO", "tree")
    plain.setenv("NCCL_DEBUG", "WARN")
    plain.setenv("NCCL_SOCKET_NTHREADS", "4")
    before = dict(os.environ)
    with nccl.set_variables(NcclTable(**ALL), num_ranks=8, on_gpu=True) as notes:
        assert {name: os.environ[name] for name in SET} == SET
        assert os.environ["NCCL_SOCKET_NTHREADS"] == "4"
    assert notes == ["NCCL_ALGO is ring,nvlstree, from [nccl], not tree, from the environment"]
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("NCCL_IB_DISABEL", "NCCL_IB_DISABLE"),
        ("NCCL_ALG", "NCCL_ALGO"),
        ("NCCL_SOCKET_IFNAMES", "NCCL_SOCKET_IFNAME"),
    ],
)
def test_a_misspelt_variable_is_refused_with_the_one_that_was_meant(
    name: str, near: str, plain: pytest.MonkeyPatch
) -> None:
    plain.setenv(name, "1")
    for on_gpu in (True, False):
        with (
            pytest.raises(InputError, match=name) as caught,
            nccl.set_variables(NcclTable(), num_ranks=2, on_gpu=on_gpu),
        ):
            pass
        assert f"did you mean {near}?" in str(caught.value.hint)
    with nccl.set_variables(NcclTable(), num_ranks=1, on_gpu=True) as notes:  # nobody reads it
        assert notes == []


def test_names_of_nccl_of_older_ones_and_of_plug_ins_pass(plain: pytest.MonkeyPatch) -> None:
    names = (
        "NCCL_IB_GID_INDEX",
        "NCCL_TREE_THRESHOLD",
        "NCCL_VERSION",
        "NCCL_ASYNC_ERROR_HANDLING",
        "NCCL_GPUDIRECTTCPX_SOCKET",
    )
    notes = nccl.check_names(dict.fromkeys(names, "1"))
    assert notes == ["NCCL has no variable NCCL_GPUDIRECTTCPX_SOCKET, unless a plug-in has"]


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"algoritm": ["ring"]}, "algorithm"),
        ({"algorithm": ["rnig"]}, "ring"),
        ({"protocol": ["LL"]}, "ll"),
        ({"debug": "loud"}, "info"),
        ({"infiniband_retries": 8}, "7"),
        ({"infiniband": False, "adapter": "mlx5_0"}, "leave nccl.adapter out"),
    ],
)
def test_what_nccl_does_not_know_is_refused_with_what_it_does(
    table: dict[str, Any], words: str
) -> None:
    with pytest.raises(SpecError) as caught:
        RunSpec(nccl=table)
    assert words in f"{caught.value.message} {caught.value.hint}"


def test_a_spec_for_gpus_trains_on_cpus_and_the_started_record_says_what_held(
    plain: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given = spec(nccl=ALL, train={"length": "2 steps"}, evaluate={"every": "9 epochs"})
    plain.setenv("NCCL_DEBUG", "INFO")
    found = run_ranks(2, lambda rank: train(tmp_path / "run", given=given), tmp_path / "ranks")
    assert [each.get("step") for each in found] == [2, 2], found
    (started,) = (
        each for each in events.read(tmp_path / "run") if isinstance(each, events.Started)
    )
    assert {
        name: value for name, value in started.variables.items() if name.startswith("NCCL_")
    } == {"NCCL_DEBUG": "INFO"}
    assert started.spec["nccl"]["algorithm"] == ["ring", "nvlstree"]
    assert "[nccl] has no effect: the ranks are on CPUs and use gloo" in started.notes
