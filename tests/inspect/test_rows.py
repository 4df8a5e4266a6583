"""Rows as Python has them: lazily, by columns and conditions."""

from pathlib import Path

import pyarrow.dataset as ds
import pytest

from posttrain_core.errors import ConfigError
from posttrain_core.inspect import Run


def test_a_run_is_named_by_its_store(made_up_store: Path, tmp_path: Path) -> None:
    assert Run(str(made_up_store)).name in ("large", "long", "short")
    assert Run(str(made_up_store), "short").config.iterations == 12
    with pytest.raises(ConfigError, match="no runs in"):
        Run(str(tmp_path))


def test_nothing_is_read_before_rows_are_wanted(made_up_store: Path) -> None:
    run = Run(str(made_up_store), "large")
    rows = run.rollouts("rollout_id", "reward", domain="program", iteration=[1, 2], purpose="train")
    rows = rows.where(ds.field("reward") > 0.5)
    assert run.store.num_requests == 0
    table = rows.to_table()
    assert table.schema == rows.schema
    assert (
        table.num_rows == rows.count() == sum(batch.num_rows for batch in rows) == rows.to_reader().read_all().num_rows
    )
    frame = rows.to_pandas()
    assert frame["reward"].min() > 0.5
    assert set(frame["rollout_id"].str[:6]) == {"i00001", "i00002"}
    everything = run.sql(
        "select rollout_id, reward from rollouts where domain = ? and purpose = 'train' and iteration in (1, 2) "
        "and reward > 0.5 order by rollout_id",
        "program",
    )
    assert table.sort_by("rollout_id").equals(everything)


def test_values_are_given_one_by_one_or_several(made_up_store: Path) -> None:
    run = Run(str(made_up_store), "short")
    assert run.verdicts(iteration=range(3, 5), purpose="train").count() == 16
    assert run.plan(iteration={3}, purpose="train").count() == 8
    assert run.executions(iteration=[]).count() == 0
    assert run.samples().count() == 0
    assert run.rollouts("breakdown", iteration=0).to_pylist()[0]["breakdown"].keys() == {"cases"}


def test_a_wrong_column_or_value_is_named(made_up_store: Path) -> None:
    run = Run(str(made_up_store), "short")
    with pytest.raises(ConfigError, match=r"rollouts have no column 'rewrd'; did you mean 'reward'"):
        run.rollouts("rewrd")
    with pytest.raises(ConfigError, match=r"no column 'domian'"):
        run.rollouts(domian="logic")
    with pytest.raises(ConfigError, match=r"'iteration' is of type int64: 'three'"):
        run.rollouts(iteration="three")
    with pytest.raises(ConfigError, match=r"rwd.*the columns are iteration"):
        run.rollouts(where=ds.field("rwd") > 1)
