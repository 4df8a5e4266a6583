"""The design's rules about who may import whom, and about the shape of files."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BANDS = [  # each imports only from those after it; siblings not from each other
    {"care", "view"},
    {"stages", "inspect"},
    {"domains"},
    {"sampling", "sandbox", "verifiers", "learner"},
    {"store", "manifest", "schema", "layout", "lease", "registry"},
    {"records", "config", "errors", "chat"},
]
FAMILIES = [
    {"store", "manifest", "schema", "layout", "lease", "registry"},
    {"records", "config", "errors", "chat"},
]  # may know each other
HEAVY = {  # package: where it may be imported
    "torch": {
        f"learner/{name}"
        for name in ("checkpoints", "engine", "gguf_import", "lora", "losses", "model", "tiny", "training", "worker")
    }
    | {f"sampling/{name}" for name in ("inprocess", "decoding", "kv_cache", "weights")},
    "deepspeed": {"learner/engine"},
    "peft": {"learner/lora"},
    "transformers": {f"learner/{name}" for name in ("demonstrations", "engine", "gguf_import", "model", "tiny")}
    | {f"sampling/{name}" for name in ("inprocess", "kv_cache", "tokenizer")},
    "docker": {"sandbox/docker"},
    "boto3": {"store/s3"},
    "botocore": {"store/s3"},
    "reasoning_gym": {"verifiers/gym_worker"},
    "vllm": {"sampling/vllm/worker_extension"},
    "prefect": set(),
}
SHARED_STAGES = {"context", "folders", "journal", "session"}  # what every stage is handed


def name_of(path: Path) -> str:
    return path.relative_to(ROOT / "posttrain_core").with_suffix("").as_posix()


FILES = sorted(path for folder in ("posttrain_core", "flows", "tasks") for path in (ROOT / folder).rglob("*.py"))
CORE = [path for path in FILES if path.is_relative_to(ROOT / "posttrain_core") and name_of(path) != "__init__"]


def imports(path: Path) -> Iterator[tuple[str, ...]]:
    """Every imported module and, for `from a import b`, a.b as well: b may be a module."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (tuple(alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from ((*str(node.module).split("."), alias.name) for alias in node.names)


def band(part: str) -> int:
    return next(number for number, parts in enumerate(BANDS) if part in parts)


@pytest.mark.parametrize("path", CORE, ids=name_of)
def test_imports_point_to_the_right(path: Path) -> None:
    part = name_of(path).split("/")[0]
    for module in imports(path):
        assert module[0] not in ("flows", "tasks", "tests"), f"{path}: the core knows nothing of {module[0]}"
        if module[0] != "posttrain_core" or module[1:2] in ((), (part,)):
            continue
        family = any({part, module[1]} <= parts for parts in FAMILIES)
        assert family or band(module[1]) > band(part), f"{path}: {part} may not import {'.'.join(module)}"


def test_a_stage_imports_no_other_stage() -> None:
    for path in CORE:
        if path.parent.name == "stages":
            others = {module[2] for module in imports(path) if module[:2] == ("posttrain_core", "stages")}
            assert others <= SHARED_STAGES, f"{path} imports {others - SHARED_STAGES}"


@pytest.mark.parametrize("package", HEAVY)
def test_heavy_packages_are_imported_where_they_are_needed_only(package: str) -> None:
    users = {name_of(path) for path in CORE if any(module[0] == package for module in imports(path))}
    assert users <= HEAVY[package], f"{package} is imported in {users - HEAVY[package]}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_file_says_what_it_is_and_is_short(path: Path) -> None:
    text = path.read_text()
    assert ast.get_docstring(ast.parse(text)), f"{path} has no docstring"
    assert len(text.splitlines()) <= 450, f"{path} is too long"
    assert path.stem not in ("utils", "util", "helpers", "common", "misc"), f"{path}: name it after what it does"


def test_what_answers_at_once_imports_nothing_heavy() -> None:
    """The pipeline, and with it every protocol and factory, before a part is chosen."""
    code = f"import sys, flows.pipeline; print(*sorted(sys.modules.keys() & set({sorted(HEAVY)!r})))"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.split() == []
