"""Problems as JSON lines: `python -m posttrain_core.domains.problem_sets data` writes the sets of that folder."""

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from pydantic import Field

from posttrain_core.config import DomainConfig, Section
from posttrain_core.domains.protocol import Domain
from posttrain_core.domains.registry import make_domain
from posttrain_core.records import Split


class ProblemSet(Section):
    """The first `num` problems of one split of a domain. `name` is the domain's name in the problem ids."""

    name: str
    domain: DomainConfig
    split: Split
    num: int = Field(ge=1)


def read_sets(folder: Path) -> dict[str, ProblemSet]:
    """By file name relative to `folder`, from its sets.json."""
    return {
        file: ProblemSet.model_validate(item) for file, item in json.loads((folder / "sets.json").read_text()).items()
    }


def lines(domain: Domain, split: Split, num: int) -> Iterator[str]:
    """One `records.Problem` a line, keys sorted, ASCII."""
    for index in range(min(num, domain.num_problems(split))):
        yield json.dumps(asdict(domain.problem(split, index)), sort_keys=True) + "\n"


def text_of(problem_set: ProblemSet) -> str:
    return "".join(lines(make_domain(problem_set.name, problem_set.domain), problem_set.split, problem_set.num))


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the problem sets that FOLDER/sets.json lists.")
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    for file, problem_set in read_sets(folder).items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text_of(problem_set))


if __name__ == "__main__":
    main()
