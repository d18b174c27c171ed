"""A tiny config of any transformers architecture, by the names that configs use for the same thing."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

VOCABULARY = 97


@dataclass(frozen=True)
class Variant:
    """One recipe; the first that a model can be built and run by is taken.

    Attributes:
        hidden: width; ``hidden // heads`` is the head size.
        kv_heads: key and value heads of models that have them.
        head_sizes: whether head sizes that a config names are set.
        experts: whether the number of experts is set.
        subconfigs: whether configs within the config are made tiny too.
    """

    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_sizes: bool = True
    experts: bool = True
    subconfigs: bool = True


VARIANTS = (
    Variant(),
    Variant(kv_heads=4),
    Variant(head_sizes=False),
    Variant(experts=False),
    Variant(hidden=128),
    Variant(hidden=128, head_sizes=False, kv_heads=4),
)
# What one kind of config needs besides, or has under names of its own.
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_OWN: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "blt": {"encoder_hash_byte_group_vocab": 101},
    "blt_local_encoder": {"hidden_size_global": 64},
    "blt_local_decoder": {"hidden_size_global": 64},
    "codegen": {"rotary_dim": 8},
    "gptj": {"rotary_dim": 8},
    "cohere_compass_text": {
        "layer_types": ["full_attention", "sliding_attention"],
        "rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), _ROPE | {"mrope_section": [2, 3, 3]}),
    },
    "dbrx": {
        # The defaults of these are for none: only checkpoints name them.
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 128, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "num_key_value_heads": 4},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid", "hybrid"],
        "num_hidden_layers": 3,
        "attention_hidden_size": 128,
    },
    "mamba2": {"num_heads": 4, "head_dim": 32, "n_groups": 1, "chunk_size": 8},
    "ministral": {"head_dim": 16},
    "mistral4": {"num_key_value_heads": 4},
    "zamba": {"layers_block_type": ["mamba", "hybrid", "hybrid"], "num_hidden_layers": 3, "attention_hidden_size": 128},
    "nemotron": {"head_dim": 16, "num_key_value_heads": 2},
    "xmod": {"default_language": "en_XX"},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "esm": {"vocab_size": VOCABULARY},
    # Codebooks are batch rows of theirs.
    "musicgen_decoder": {"num_codebooks": 1},
    "musicgen_melody_decoder": {"num_codebooks": 1},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
        "hc_lowrank": 16,
        "ple_layer_ids": [1],
        "eos_token_id": 1,
        "ngram_vocab_size_base": 50,
        "heads_per_ngram": 2,
        "split_ngram_parts": 1,
        "make_ngram_vocab_size_divisible_by": 8,
    },
    **{
        name: {"rope_parameters": _ROPE | {"mrope_section": [2, 3, 3]}}
        for name in ("qwen2_vl_text", "qwen2_5_vl_text", "glm4v_text", "glm_image_text", "glm_ocr_text")
    },
    # Rotates half of each head.
    "glm4v_moe_text": {"rope_parameters": _ROPE | {"mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}},
    # One window for all layers; it is shared out to both sides.
    "longformer": {"attention_window": 4},
    "led": {"attention_window": 4},
    "reformer": {"axial_pos_embds": False},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "hunyuan_vl_text": {"head_dim": 16, "rope_parameters": _ROPE | {"mrope_section": [2, 2, 2, 2]}},
    # Audio codes of several channels are one more dim of its decoder's ids.
    "dia": {"delay_pattern": [0]},
    "dia_decoder": {
        "num_channels": 1,
        "cross_num_attention_heads": 4,
        "cross_num_key_value_heads": 4,
        "cross_head_dim": 16,
        "cross_hidden_size": 64,
    },
    "glm5_next_text": {
        "num_key_value_heads": 4,
        "qk_rope_head_dim": 0,
        "index_topk": 8,
        "index_kpool": 4,
        "index_n_heads": 4,
        "linear_head_dim": 16,
        "linear_num_heads": 4,
        "layer_types": ["linear_attention", "deepseek_sparse_attention"],
        "mlp_layer_types": ["dense", "sparse"],
        "indexer_types": ["full", "full"],
    },
}
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers",
           "num_decoder_layers", "num_encoder_layers")  # fmt: skip


def _sizes(v: Variant) -> dict[str, Any]:
    head = v.hidden // v.heads
    pairs = [
        (v.hidden, "hidden_size n_embd d_model dim emb_dim embedding_size word_embed_proj_dim lru_width dim_model "
                   "attention_hidden_size encoder_hidden_size"),
        (2 * v.hidden, "intermediate_size n_inner ffn_dim decoder_ffn_dim encoder_ffn_dim d_ff d_inner hidden_dim "
                       "ffn_hidden_size dim_ff intermediate_size_mlp mamba_intermediate_size"),
        (v.hidden // 2, "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size "
                        "shared_intermediate_size moe_shared_expert_intermediate_size dense_intermediate_size"),
        (v.heads, "num_attention_heads n_head n_heads decoder_attention_heads encoder_attention_heads num_heads "
                  "num_decoder_attention_heads num_encoder_attention_heads linear_num_value_heads mamba_n_heads"),
        (v.kv_heads, "num_key_value_heads num_kv_heads n_head_kv linear_num_key_heads num_global_key_value_heads"),
        (VOCABULARY, "vocab_size vocab_size_per_layer_input decoder_vocab_size"),
        (128, "max_position_embeddings n_positions n_ctx max_seq_len seq_length context_length"),
        (3, "sliding_window attention_window local_attention_window"),
        (4, "attention_chunk_size"),
        (8, "state_size mamba_d_state ssm_state_size hidden_size_per_layer_input patch_size index_head_dim index_topk "
            "mamba_chunk_size"),
        (32, "image_size mamba_d_head mamba_head_dim"),
    ]  # fmt: skip
    if v.head_sizes:
        pairs += [
            (head, "head_dim d_kv attention_head_size kv_channels global_head_dim v_head_dim qk_nope_head_dim "
                   "linear_key_head_dim linear_value_head_dim kv_lora_rank"),
            (24, "q_lora_rank"),
            (8, "qk_rope_head_dim"),
            (head + 8, "qk_head_dim"),
        ]  # fmt: skip
    out: dict[str, Any] = {name: value for value, names in pairs for name in names.split()}
    if v.experts:
        out |= dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4)
        out |= dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token"), 2)
        out |= {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_kv_shared_layers": 0}
    return out


def tiny_config(kind: Any, variant: Variant, causal: bool = False) -> Any:
    """The config of class ``kind`` with two layers, or one of each kind of layer.

    Args:
        kind: a class of transformers' configs.
        variant: the recipe.
        causal: whether an encoder's config is to make a decoder.
    """
    kwargs = _overrides(kind(), variant)
    if causal:
        default = kind()
        kwargs |= {k: v for k, v in (("is_decoder", True), ("is_encoder_decoder", False)) if hasattr(default, k)}
    return kind(**kwargs)


def _overrides(default: Any, variant: Variant) -> dict[str, Any]:
    from transformers import PreTrainedConfig

    values = {**_taken(default), **vars(default)}
    values["model_type"] = default.model_type
    real = {getattr(default, "attribute_map", {}).get(k, k): v for k, v in _sizes(variant).items()}
    out: dict[str, Any] = {}
    for name, value in real.items():
        if values.get(name) is not None:
            out[name] = value
    kept = _kept_layers(values)
    layers = {n: values[n] for n in _LAYERS if isinstance(values.get(n), int)}
    out |= dict.fromkeys(layers, len(kept))
    token = VOCABULARY
    for name, value in values.items():
        if isinstance(value, PreTrainedConfig):
            if variant.subconfigs:
                out[name] = type(value)(**_overrides(value, variant)).to_dict()
        elif isinstance(value, (list, tuple)) and len(value) in layers.values() and len(value) > 2:
            out[name] = [value[i] for i in kept]
        elif isinstance(value, dict) and "mrope_section" in value:
            # Sections share out half of a head's rotated dims.
            out[name] = {**value, "mrope_section": [2, 3, 3]}
        elif isinstance(value, int) and value >= VOCABULARY and name.endswith(("token_id", "token_index", "_id")):
            token -= 1
            out[name] = token
    if "pad_token_id" in values and values["pad_token_id"] is None:
        out["pad_token_id"] = 0
    rotated = values.get("qk_rope_head_dim")
    if rotated and values.get("head_dim") == rotated and variant.head_sizes:
        # Where the value and the plain part have sizes of their own, this is the rotated part's.
        out["head_dim"] = _sizes(variant)["qk_rope_head_dim"]
    return out | _OWN.get(values.get("model_type", ""), {})


def _taken(default: Any) -> dict[str, Any]:
    """What its constructor takes and it then has."""
    found: dict[str, Any] = {}
    for name in set(inspect.signature(type(default).__init__).parameters) - {"self", "kwargs", "args"}:
        try:
            found[name] = getattr(default, name)
        except Exception:  # not there, or different in each layer
            continue
    return found


def _kept_layers(values: dict[str, Any]) -> list[int]:
    """Which layers of the default config stay: two, and one of each kind."""
    kinds = values.get("layer_types") or values.get("layers_block_type") or []
    kept = sorted({k: i for i, k in reversed(list(enumerate(kinds)))}.values())
    return kept if len(kept) > 1 else [0, 1]
