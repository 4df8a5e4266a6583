"""`posttrain model`: starting policies. `import-gguf` makes one of a GGUF file, `show` says what a folder holds."""

import json
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from flows.cli.options import AsJson
from flows.cli.output import print_json
from posttrain_core.errors import ConfigError

app = typer.Typer(help="Starting policies: import one, look at one.", no_args_is_help=True)


@app.command("import-gguf")
def import_gguf(
    source: Annotated[str, typer.Argument(help="A .gguf file, or an installed package that holds just one.")],
    target: Annotated[Path, typer.Argument(help="The folder to write, for model.path.")],
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Precision of the weights.")] = "float32",
) -> None:
    """Make a Hugging Face model folder of a GGUF file."""
    if missing := [name for name in ("gguf", "accelerate", "transformers", "torch") if find_spec(name) is None]:
        raise ConfigError(f"{', '.join(missing)} is not installed: pip install 'posttrain[gguf,train]'")
    from posttrain_core.learner import gguf_import  # takes seconds to import

    gguf_import.import_gguf(source, target, dtype)
    for name, value in describe(target).items():
        typer.echo(f"{name:<14} {value}")
    typer.echo(f"wrote {target}; use it by model.path")


@app.command()
def show(folder: Annotated[Path, typer.Argument(help="A model folder.")], as_json: AsJson = False) -> None:
    """Say what a Hugging Face model folder holds: architecture, parameters, context, chat template."""
    found = describe(folder)
    if as_json:
        print_json(found)
        return
    for name, value in found.items():
        typer.echo(f"{name:<14} {value}")


def describe(folder: Path) -> dict[str, Any]:
    """From config.json, the headers of the safetensors files and the tokenizer's files; no weights are read."""
    from safetensors import SafetensorError, safe_open

    try:
        config = json.loads((folder / "config.json").read_text())
        sizes: dict[str, int] = {}
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="numpy") as file:
                sizes |= {name: prod(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(f"{folder} is no whole Hugging Face model folder: {error}") from error
    return {
        "architecture": ", ".join(config.get("architectures") or [str(config.get("model_type"))]),
        "parameters": sum(sizes.values()),
        "dtype": config.get("dtype") or config.get("torch_dtype"),
        "context": config.get("max_position_embeddings"),
        "vocabulary": config.get("vocab_size"),
        "chat template": (folder / "chat_template.jinja").is_file() or "chat_template" in tokenizer,
    }
