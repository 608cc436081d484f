"""A tiny Llama as a GGUF file, whole or split as `llama-gguf-split` does it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf

from tiny_models import byte_tokenizer, tiny_model

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_model() -> Any:
    """The model that `write_gguf` writes: 256 bytes, two special tokens and the merged pair that a BPE needs."""
    return tiny_model(vocab_size=259, tie_word_embeddings=True)


def write_gguf(file: Path, *, part: tuple[int, int] | None = None, leave_out: str | None = None) -> Path:
    """Two layers; `part` (first is 0, of how many) marks a split file, which holds the first layer alone.

    `leave_out`: a part of the names of tensors that the file lacks.
    """
    model, tokenizer = gguf_model(), byte_tokenizer()
    config = model.config
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    words = [*tokenizer.convert_ids_to_tokens(range(258)), "ab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    writer.add_token_types([3, 3, *[1] * 257])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    if part is not None:
        writer.add_uint16("split.no", part[0])
        writer.add_uint16("split.count", part[1])
    for name, tensor in model.state_dict().items():
        ours = _renamed(name)
        missing = leave_out is not None and leave_out in ours
        if name == "lm_head.weight" or missing or (part is not None and ours.startswith("blk.1.")):
            continue
        writer.add_tensor(ours, _permuted(ours, tensor, config).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _renamed(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        index, rest = stem.removeprefix("model.layers.").split(".", 1)
        return f"blk.{index}.{_NAMES[rest]}.{kind}"
    return f"{_NAMES.get(stem, 'output')}.{kind}"


def _permuted(name: str, tensor: Any, config: Any) -> Any:
    """Query and key rows in llama.cpp's order of a head's rotated pairs."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    count = next((n for part, n in heads.items() if f".{part}." in name), None)
    if count is None:
        return tensor.contiguous()
    rows, width = tensor.shape
    return tensor.reshape(count, 2, rows // count // 2, width).swapaxes(1, 2).reshape(rows, width).contiguous()
