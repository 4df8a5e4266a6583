"""A tiny Llama as a GGUF file: what llama.cpp's converter would write of random weights and a byte-level vocabulary."""

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, dequantize, quantize
from transformers.convert_slow_tokenizer import bytes_to_unicode

HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, CONTEXT = 64, 96, 2, 4, 2, 128
TEMPLATE = "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}<|start|>assistant"
CONTROL = ("<|pad|>", "<|start|>", "<|end|>", "<|turn|>")
MERGES = [("Ċ", "Ċ"), ("Ġ", "Ġ"), ("h", "e"), ("1", "2")]
BYTES = list(bytes_to_unicode().values())
TOKENS = [*CONTROL, *BYTES, *("".join(pair) for pair in MERGES)]
QUANTIZED = GGMLQuantizationType.Q8_0


def weights(seed: int = 0) -> dict[str, np.ndarray]:
    """By the names of a GGUF file, rows of query and key in the order of a Hugging Face model; float32."""
    stream = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (len(TOKENS), HIDDEN), "output_norm.weight": (HIDDEN,)}
    kv = HIDDEN // HEADS * KV_HEADS
    for layer in range(LAYERS):
        parts = {"attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,), "attn_q": (HIDDEN, HIDDEN), "attn_k": (kv, HIDDEN)}
        parts |= {"attn_v": (kv, HIDDEN), "attn_output": (HIDDEN, HIDDEN), "ffn_gate": (FFN, HIDDEN)}
        parts |= {"ffn_up": (FFN, HIDDEN), "ffn_down": (HIDDEN, FFN)}
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in parts.items()}
    return {name: stream.normal(0, 0.2, shape).astype(np.float32) for name, shape in shapes.items()}


def stored(array: np.ndarray) -> np.ndarray:
    """What is left of it after the file: matrices are quantized to 8 bits."""
    return array if array.ndim == 1 else dequantize(quantize(array, QUANTIZED), QUANTIZED)


def write_gguf(path: Path, arch: str = "llama", pre: str = "smollm", **more: np.ndarray) -> Path:
    """`more`: further tensors by name, with _ for a dot."""
    writer = GGUFWriter(path, arch)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(CONTROL) + [1] * (len(TOKENS) - len(CONTROL)))
    writer.add_token_merges([" ".join(pair) for pair in MERGES])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(3)
    writer.add_pad_token_id(0)
    writer.add_chat_template(TEMPLATE)
    for name, array in (weights() | {name.replace("_", ".", 1): array for name, array in more.items()}).items():
        if array.ndim == 1:
            writer.add_tensor(name, array)
        else:
            writer.add_tensor(name, quantize(_rows_as_llama_cpp_has_them(name, array), QUANTIZED), raw_dtype=QUANTIZED)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _rows_as_llama_cpp_has_them(name: str, array: np.ndarray) -> np.ndarray:
    """Rotary embeddings turn neighbouring rows there, and rows of the two halves of a head in Hugging Face models."""
    heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name.split(".")[-2])
    if heads is None:
        return array
    halves: Any = array.reshape(heads, 2, array.shape[0] // heads // 2, array.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(array.shape))
