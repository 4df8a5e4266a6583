"""Configuration: what is wrong is said with its path, what was given, what is allowed and what was meant."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from flows.cli.config_file import load_config
from flows.cli.settings import all_paths, section_at
from posttrain_core.config import PlanConfig, ReasoningGymDomainConfig, RunConfig
from posttrain_core.errors import ConfigError

GOOD = "domains: {p: {type: program}}\nmodel: {path: somewhere}\n"


def load(tmp_path: Path, text: str, *overrides: str) -> RunConfig:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return load_config(path, overrides)


def message(tmp_path: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, *overrides)
    return str(caught.value)


def test_file_and_overrides(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        GOOD + "plan: {group_size: 3, temperature: 0.5}\n",
        "plan.group_size=5",
        "learner.learning_rate=1e-3",
        "run=other",
        "domains.q={type: reasoning_gym, generator: basic_arithmetic}",
        "domains.q.options.min_terms=2",
        "algorithm.kl.estimator=k1",
        "sampler.num_threads=2",
        "stop.eval_pass_rate=null",
    )
    assert (config.run, config.plan) == ("other", PlanConfig(group_size=5, temperature=0.5))
    assert config.learner.learning_rate == 1e-3
    assert isinstance(config.domains["q"], ReasoningGymDomainConfig)
    assert config.domains["q"].options == {"min_terms": 2}
    assert config.algorithm.kl is not None
    assert (config.sampler.type, config.stop.eval_pass_rate) == ("inprocess", None)


def test_a_base_is_laid_under_the_overrides(tmp_path: Path) -> None:
    base = load(tmp_path, GOOD + "seed: 7\n")
    changed = load_config(None, ["iterations=99"], base=base)
    assert changed == base.model_copy(update={"iterations": 99})


@pytest.mark.parametrize(
    ("text", "overrides", "parts"),
    [
        ("", (), ["domains: missing"]),
        (GOOD, ("plan.grup_size=4",), ["plan.grup_size: there is no such setting", "did you mean group_size?"]),
        (GOOD, ("group_size=4",), ["group_size: there is no such setting", "did you mean plan.group_size?"]),
        (GOOD, ("zzz=4",), ["zzz: there is no such setting", "allowed: run, store"]),
        (GOOD, ("domains.p.wieght=2",), ["domains.p.wieght: there is no such setting", "did you mean weight?"]),
        (GOOD, ("plan.group_size=x",), ["plan.group_size is 'x'", "allowed: a valid integer"]),
        (GOOD, ("plan.temperature=0",), ["plan.temperature is 0", "allowed: greater than 0"]),
        (GOOD, ("algorithm.preset=ppo",), ["algorithm.preset is 'ppo'", "'grpo', 'dr_grpo'"]),
        (GOOD, ("algorithm.kl.estimator=k9",), ["algorithm.kl.estimator is 'k9'", "'k1', 'k2' or 'k3'"]),
        (GOOD, ("sampler.type=vlm",), ["sampler.type is 'vlm'", "'inprocess'"]),
        (GOOD, ("domains.q.weight=2",), ["domains.q.type: missing", "program, reasoning_gym"]),
        (GOOD, ("domains.q.type=reasoning_gym",), ["domains.q.generator: missing", "Name of the generator"]),
        (GOOD, ("stop=3",), ["stop is 3", "allowed: a mapping"]),
        (GOOD, ("plan=3", "plan.group_size=2"), ["plan is 3", "mapping"]),
        (GOOD, ("run=a/b",), ["run is 'a/b'", "pattern"]),
        (GOOD, ("model.path=",), ["model.path is None"]),
        (GOOD, ("model.path=''",), ["model.path is empty", "name a local"]),
        (GOOD, ("sampler.type=scripted",), ["'scripted' does not go with learner.type 'deepspeed'"]),
        (GOOD, ("algorithm.normalizer=9",), ["algorithm.normalizer has no effect with preset grpo"]),
        (GOOD, ("plan",), ["--set 'plan'", "plan.group_size=16"]),
        (GOOD, ("plan.=1",), ["--set 'plan.=1'"]),
        (GOOD, ("seed=[1",), ["--set 'seed=[1'", "YAML"]),
        ("a: [1,\n", (), ["run.yaml, line 2, column 1 cannot be read as YAML"]),
        ("seed: 1\nplan: {}\nseed: 2\n", (), ["run.yaml, line 3, column 1", "'seed' is given twice"]),
        ("[1, 2]", (), ["run.yaml is [1, 2]", "mapping"]),
    ],
)
def test_what_is_wrong_is_said(text: str, overrides: tuple[str, ...], parts: list[str], tmp_path: Path) -> None:
    found = message(tmp_path, text, *overrides)
    for part in parts:
        assert part in found


def test_all_mistakes_are_said_at_once(tmp_path: Path) -> None:
    found = message(tmp_path, GOOD, "plan.group_size=0", "learner.num_ranks=-1", "seeed=3")
    assert "3 settings are wrong" in found
    for part in (
        "plan.group_size is 0",
        "learner.num_ranks is -1",
        "seeed: there is no such setting; did you mean seed?",
    ):
        assert part in found


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*none.yaml: No such file.*posttrain init"):
        load_config(tmp_path / "none.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_config(tmp_path / "binary.yaml")


def test_yaml_tags_make_no_objects(tmp_path: Path) -> None:
    assert "YAML" in message(tmp_path, "run: !!python/object/apply:os.getcwd []\n")


def test_every_path_leads_to_its_section() -> None:
    """What suggestions are made of agrees with the model: each path but those of a choice that is not the default."""
    data: dict[str, Any] = {"domains": {"NAME": {"type": "program"}}}
    paths = list(all_paths())
    assert {"plan.group_size", "domains.NAME.weight", "algorithm.importance.limit", "seed"} <= set(paths)
    for path in ("plan.group_size", "domains.NAME.weight", "algorithm.importance.limit", "seed"):
        section = section_at(tuple(path.split(".")), data)
        assert section is not None
        assert path.rpartition(".")[2] in section.model_fields


def test_the_template_is_the_defaults(tmp_path: Path) -> None:
    from flows.cli.template import template

    text = template("x.yaml")
    assert "model.path is empty" in message(tmp_path, text)
    config = load(tmp_path, text, "model.path=m")
    assert config == RunConfig.model_validate({"domains": {"program": {"type": "program"}}, "model": {"path": "m"}})
    lines = [line.removeprefix("# ") if line.startswith(("# sft", "#   ")) else line for line in text.splitlines()]
    uncommented = "\n".join(lines)
    assert yaml.safe_load(uncommented)["sft"] == {
        "num_demonstrations": 4000,
        "epochs": 1,
        "learning_rate": 0.001,
        "batch_size": 64,
        "warmup_steps": 20,
        "weight_decay": 0.0,
    }
    for name in RunConfig.model_fields:
        assert f"\n{name}:" in text or f"\n# {name}:" in text
