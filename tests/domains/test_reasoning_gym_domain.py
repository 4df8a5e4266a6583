"""The reasoning-gym domain: any generator by name, disjoint splits, its own scorer, failures in bounded time."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from posttrain_core.config import ReasoningGymDomainConfig
from posttrain_core.domains.reasoning_gym import ReasoningGymDomain
from posttrain_core.errors import ConfigError, VerifierFault
from posttrain_core.records import Execution, ExecutionStatus, Outcome, Problem, Split, Verdict
from tests.verifiers.rows import rollout_of

SUMS = {"min_terms": 2, "max_terms": 2, "max_digits": 2, "operators": ["+"], "allow_negation": False}
NOTHING = Execution("r", ExecutionStatus.NOTHING)


@pytest.fixture(scope="module")
def sums() -> Iterator[ReasoningGymDomain]:
    config = ReasoningGymDomainConfig(
        generator="basic_arithmetic", options=SUMS, num_problems=300, demonstration_quality=0.3
    )
    domain = ReasoningGymDomain("sums", config)
    yield domain
    domain.close()


def judge(domain: ReasoningGymDomain, problem: Problem, text: str) -> Verdict:
    return domain.verify(problem, rollout_of(text), NOTHING)


def problems(domain: ReasoningGymDomain, split: Split) -> list[Problem]:
    return [domain.problem(split, index) for index in range(domain.num_problems(split))]


def test_the_splits_share_no_question_and_no_question_occurs_twice(sums: ReasoningGymDomain) -> None:
    texts = {split: [problem.prompt[0].content for problem in problems(sums, split)] for split in Split}
    everything = texts[Split.TRAIN] + texts[Split.HELD_OUT]
    assert len(set(everything)) == len(everything)
    assert texts[Split.TRAIN]
    assert texts[Split.HELD_OUT]


def test_more_problems_never_move_a_question_to_the_other_split(sums: ReasoningGymDomain) -> None:
    config = ReasoningGymDomainConfig(generator="basic_arithmetic", options=SUMS, num_problems=400)
    wider = ReasoningGymDomain("sums", config)
    for split in Split:
        assert {p.id for p in problems(sums, split)} <= {p.id for p in problems(wider, split)}
    wider.close()


def test_the_reference_passes_and_others_do_not(sums: ReasoningGymDomain) -> None:
    for problem in problems(sums, Split.HELD_OUT)[:10]:
        answer = problem.hidden["answer"]
        for text in (answer, f" {answer}\n", f"**{answer}**", f"Adding up gives <answer>{answer}</answer>"):
            assert judge(sums, problem, text).reward == 1.0
        for text in (str(int(answer) + 1), f"{answer}0", f"{answer} or {int(answer) + 1}", f"1 2 3 {answer}"):
            assert judge(sums, problem, text).reward == 0.0


@pytest.mark.parametrize("text", ["", "   ", "7" * 5000])
def test_empty_and_endless_answers_are_invalid(sums: ReasoningGymDomain, text: str) -> None:
    verdict = judge(sums, sums.problem(Split.TRAIN, 0), text)
    assert (verdict.outcome, verdict.reward, verdict.flags) == (Outcome.SCORED, 0.0, ("invalid",))


def test_partial_scores_pay_only_where_the_configuration_says_so(sums: ReasoningGymDomain) -> None:
    config = ReasoningGymDomainConfig(generator="basic_arithmetic", options=SUMS, num_problems=300, min_score=0.0)
    lenient = ReasoningGymDomain("sums", config)
    problem = sums.problem(Split.TRAIN, 0)
    text = f"{problem.hidden['answer']} or so"
    assert 0.0 < judge(lenient, problem, text).reward < 1.0
    assert judge(sums, problem, text).reward == 0.0
    assert lenient.verifier_fingerprint() != sums.verifier_fingerprint()
    lenient.close()


def test_a_truncated_rollout_keeps_its_outcome(sums: ReasoningGymDomain) -> None:
    verdict = sums.verify(sums.problem(Split.TRAIN, 0), rollout_of("1", Outcome.TRUNCATED), NOTHING)
    assert verdict.outcome is Outcome.TRUNCATED


def test_demonstrations_have_the_quality_asked_for_and_come_from_the_training_split(sums: ReasoningGymDomain) -> None:
    answers = {p.prompt[0].content: p.hidden["answer"] for p in problems(sums, Split.TRAIN)}
    demonstrations = sums.demonstrations(2000, seed=5)
    right = sum(answers[d.prompt[0].content] == d.response for d in demonstrations)
    assert 0.25 < right / len(demonstrations) < 0.35
    assert sums.demonstrations(50, seed=5) == demonstrations[:50]


def test_an_unknown_generator_is_answered_with_the_nearest_names() -> None:
    domain = ReasoningGymDomain("x", ReasoningGymDomainConfig(generator="basic_arithmetics"))
    with pytest.raises(ConfigError, match=r"'basic_arithmetics'.*basic_arithmetic,"):
        domain.num_problems(Split.TRAIN)


@pytest.mark.parametrize("options", [{"min_terms": 0}, {"no_such_option": 1}])
def test_refused_options_are_a_config_error_that_names_them(options: dict[str, int]) -> None:
    domain = ReasoningGymDomain("x", ReasoningGymDomainConfig(generator="basic_arithmetic", options=options))
    with pytest.raises(ConfigError, match=next(iter(options))):
        domain.num_problems(Split.TRAIN)


def test_too_few_different_questions_are_a_config_error() -> None:
    config = ReasoningGymDomainConfig(generator="count_bits", options={"min_n": 5, "max_n": 5}, num_problems=10)
    with pytest.raises(ConfigError, match="num_problems"):
        ReasoningGymDomain("x", config).num_problems(Split.TRAIN)


def test_a_reference_from_another_version_is_a_fault_not_a_reward(sums: ReasoningGymDomain) -> None:
    problem = sums.problem(Split.TRAIN, 0)
    other = Problem(problem.id, "sums", Split.TRAIN, problem.prompt, hidden={**problem.hidden, "answer": "?"})
    with pytest.raises(VerifierFault, match="install the version"):
        judge(sums, other, "5")


def test_references_that_do_not_score_are_surfaced(sums: ReasoningGymDomain) -> None:
    assert sums.misjudged_references(20) == []


def test_importing_the_domain_does_not_import_the_package() -> None:
    code = "import posttrain_core.domains.reasoning_gym, sys; sys.exit('reasoning_gym' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


FAKE_PACKAGE = """
import pathlib, signal, socket, os
REFERENCES = {3: "broken", 25: "endless", 26: "immense"}

class Dataset:
    def __init__(self, size):
        self.size, self.hidden, self.connect = size, eval, lambda: socket.create_connection(("127.0.0.1", 1))
        self.environment = lambda: ",".join(sorted(os.environ))
    def __len__(self): return self.size
    def __getitem__(self, i):
        return {"question": f"q{i}", "answer": REFERENCES.get(i, "right"), "metadata": {}}
    def score_answer(self, answer, entry):
        if answer == "hang" or entry["answer"] == "endless": 10 ** 10 ** 10
        if answer.startswith("hang once "):
            try: pathlib.Path(answer.split()[-1]).mkdir()
            except FileExistsError: return 1.0
            10 ** 10 ** 10
        if answer == "crash": signal.raise_signal(signal.SIGKILL)
        if answer == "exit": raise SystemExit
        if answer == "raise" or entry["answer"] == "broken": raise KeyError("no such thing")
        if answer == "noise": print("score 1.0", flush=True)
        if answer.startswith("evaluate "): return self.hidden(answer.removeprefix("evaluate "))
        if answer.startswith("write "): pathlib.Path(answer.split()[-1]).write_text("1")
        if answer == "environment": raise KeyError(self.environment())
        if answer == "connect": self.connect()
        if entry["answer"] == "immense": return 7.0
        return {"not a number": float("nan"), "big": 7.0, "right": 1, "rounded": 1.0 + 2e-16}.get(answer, 0.0)

class Evaluating(Dataset):
    def parse(self, answer): return eval(answer)
    def score_answer(self, answer, entry): return float(self.parse(answer) == 1)

class Lenient(Dataset):
    def score_answer(self, answer, entry): return float(answer in ("right", "garbage"))

class Harsh(Dataset):
    def score_answer(self, answer, entry): return 0.0

DATASETS = {kind.__name__: (kind, None) for kind in (Dataset, Evaluating, Lenient, Harsh)}
def create_dataset(name, seed, size): return DATASETS[name][0](size)
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ReasoningGymDomain]:
    """A domain whose worker imports a package with a treacherous scorer."""
    (tmp_path / "reasoning_gym").mkdir()
    (tmp_path / "reasoning_gym" / "__init__.py").touch()
    (tmp_path / "reasoning_gym" / "factory.py").write_text(FAKE_PACKAGE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    domain = fake_domain("Dataset")
    yield domain
    domain.close()


def fake_domain(generator: str) -> ReasoningGymDomain:
    config = ReasoningGymDomainConfig(generator=generator, num_problems=40, score_timeout_seconds=0.5)
    return ReasoningGymDomain("fake", config)


def item(domain: ReasoningGymDomain, reference: str = "right") -> Problem:
    return next(p for split in Split for p in problems(domain, split) if p.hidden["answer"] == reference)


@pytest.mark.parametrize(
    ("answer", "flag"),
    [("hang", "scorer_timeout"), ("crash", "scorer_died"), ("exit", "scorer_died"), ("raise", "scorer_raised")],
)
def test_an_answer_that_breaks_the_scorer_is_reward_zero_and_the_next_one_is_scored(
    fake: ReasoningGymDomain, answer: str, flag: str
) -> None:
    verdict = judge(fake, item(fake), answer)
    assert (verdict.outcome, verdict.reward, verdict.flags) == (Outcome.SCORED, 0.0, (flag,))
    assert judge(fake, item(fake), "right").reward == 1.0


@pytest.mark.parametrize("answer", ["not a number", "big"])
def test_a_score_outside_the_unit_interval_is_reward_zero(fake: ReasoningGymDomain, answer: str) -> None:
    verdict = judge(fake, item(fake), answer)
    assert (verdict.outcome, verdict.reward, verdict.flags) == (Outcome.SCORED, 0.0, ("scorer_fault",))
    assert "not in [0, 1]" in json.loads(verdict.evidence)["reason"]


def test_a_reference_with_a_score_outside_the_unit_interval_is_a_fault(fake: ReasoningGymDomain) -> None:
    with pytest.raises(VerifierFault, match=r"reference answer, which is not in \[0, 1\]"):
        judge(fake, item(fake, "immense"), "big")


def test_what_rounding_adds_to_a_score_is_taken_off(fake: ReasoningGymDomain) -> None:
    assert judge(fake, item(fake), "rounded").reward == 1.0


@pytest.mark.parametrize("answer", ["nan", "-INF", "1 + nanj", "infinity"])
def test_a_number_that_is_not_finite_never_reaches_the_scorer(fake: ReasoningGymDomain, answer: str) -> None:
    verdict = judge(fake, item(fake), answer)
    assert (verdict.outcome, verdict.reward, verdict.flags) == (Outcome.SCORED, 0.0, ("not_finite",))


def test_an_answer_that_is_not_scored_in_time_is_tried_once_more(fake: ReasoningGymDomain, tmp_path: Path) -> None:
    assert judge(fake, item(fake), f"hang once {tmp_path / 'mark'}").reward == 1.0


def test_a_problem_whose_reference_is_not_scored_in_time_either_is_not_held_against_the_policy(
    fake: ReasoningGymDomain,
) -> None:
    assert judge(fake, item(fake, "endless"), "anything").outcome is Outcome.INFRA_FAILED


def test_no_text_is_evaluated_even_by_a_scorer_that_the_scan_does_not_see_through(fake: ReasoningGymDomain) -> None:
    verdict = judge(fake, item(fake), "evaluate 1.0")
    assert (verdict.reward, verdict.flags) == (0.0, ("scorer_raised",))
    assert "may not evaluate code" in verdict.evidence


def test_a_scorer_sees_no_credentials_and_writes_no_file(fake: ReasoningGymDomain, tmp_path: Path) -> None:
    seen = judge(fake, item(fake), "environment").evidence
    assert "PATH" in seen
    assert "AWS" not in seen
    assert judge(fake, item(fake), f"write {tmp_path / 'file'}").flags == ("scorer_raised",)
    assert not (tmp_path / "file").exists() or (tmp_path / "file").read_text() == ""


def test_a_scorer_that_evaluates_answers_is_refused(fake: ReasoningGymDomain) -> None:
    with pytest.raises(ConfigError, match=r"Evaluating.parse uses eval.*choose another generator"):
        fake_domain("Evaluating").num_problems(Split.TRAIN)


def test_a_scorer_that_takes_a_canned_answer_for_right_is_refused(fake: ReasoningGymDomain) -> None:
    domain = fake_domain("Lenient")
    with pytest.raises(ConfigError, match=r"first 20 problems.*: 'garbage' \(20\); choose"):
        domain.num_problems(Split.TRAIN)
    domain.close()


def test_a_scorer_that_does_not_pay_its_references_is_refused(fake: ReasoningGymDomain) -> None:
    domain = fake_domain("Harsh")
    with pytest.raises(ConfigError, match="does not pay 20 of its first 20 reference answers"):
        domain.num_problems(Split.TRAIN)
    domain.close()


@pytest.mark.parametrize(
    ("generator", "answer"),
    [
        ("complex_arithmetic", "'nan'"),
        ("game_of_life_halting", "'garbage'"),
        ("coin_flip", "999"),
    ],
)
def test_generators_known_to_pay_wrong_answers_are_refused(generator: str, answer: str) -> None:
    domain = ReasoningGymDomain("x", ReasoningGymDomainConfig(generator=generator, num_problems=40))
    with pytest.raises(ConfigError, match=answer):
        domain.num_problems(Split.TRAIN)
    domain.close()


def test_no_year_is_asked_about_on_both_sides_of_the_split() -> None:
    config = ReasoningGymDomainConfig(
        generator="calendar_arithmetic", options={"tasks": ["is_leap_year"]}, num_problems=1000
    )
    domain = ReasoningGymDomain("years", config)
    texts = {split: [problem.prompt[0].content for problem in problems(domain, split)] for split in Split}
    years = {split: {re.search(r"\d{4}", text).group() for text in texts[split]} for split in Split}  # type: ignore[union-attr]
    assert len(years[Split.HELD_OUT]) > 5
    assert len(texts[Split.HELD_OUT]) > len(years[Split.HELD_OUT])  # a year is asked about in several ways
    assert not years[Split.TRAIN] & years[Split.HELD_OUT]
    domain.close()


def test_what_a_scorer_prints_is_not_taken_for_a_score(fake: ReasoningGymDomain) -> None:
    assert judge(fake, item(fake), "noise").reward == 0.0
    assert judge(fake, item(fake), "right").reward == 1.0


def test_a_scorer_that_raises_on_its_own_reference_makes_the_rollout_unscorable(fake: ReasoningGymDomain) -> None:
    assert judge(fake, item(fake, "broken"), "anything").outcome is Outcome.UNSCORABLE
    assert "broken" in [found["reference"] for found in fake.misjudged_references(40)]


ORPHANS = """
import os, sys, threading
from posttrain_core.config import ReasoningGymDomainConfig
from posttrain_core.domains.reasoning_gym import ReasoningGymDomain
from posttrain_core.records import Split
config = ReasoningGymDomainConfig(generator="Dataset", num_problems=40, score_timeout_seconds=600.0)
domain = ReasoningGymDomain("fake", config)
domain.num_problems(Split.TRAIN)
threading.Thread(target=domain._scorer.score, args=(0, "hang")).start()
print("ready", flush=True)
"""


def processes_with(mark: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                environment = (entry / "environ").read_bytes()
            except OSError:
                continue
            if mark.encode() in environment:
                found.append(int(entry.name))
    return found


def test_no_worker_outlives_its_killed_parent_even_while_a_scorer_hangs(
    fake: ReasoningGymDomain, tmp_path: Path
) -> None:
    fake.close()
    mark = str(tmp_path)  # of the path that the worker is handed
    search = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": search}
    parent = subprocess.Popen([sys.executable, "-c", ORPHANS], stdout=subprocess.PIPE, env=environment)
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"ready\n"
    assert len(processes_with(mark)) == 3  # the parent, its worker, the worker's child
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 30
    while processes_with(mark) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes_with(mark) == []
