"""Tiny random models of every family, saved as Hugging Face folders, and a byte tokenizer."""

from pathlib import Path

import torch

BOS, EOS, PAD, UNK = 256, 257, 258, 259
VOCAB = 260

FAMILIES = {
    "llama": ("LlamaConfig", {}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {}),
    "gemma3": ("Gemma3TextConfig", {"sliding_window": 16, "query_pre_attn_scalar": 16}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "num_hidden_layers": 3,
            "mlp_only_layers": [1],
            "norm_topk_prob": True,
        },
    ),
    "qwen3_5": (
        "Qwen3_5TextConfig",
        {
            "num_hidden_layers": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 12,
            "linear_num_value_heads": 4,
            "linear_value_head_dim": 20,
            "linear_conv_kernel_dim": 4,
        },
    ),
}


def build_model(family="llama", *, seed=0, **overrides):
    """A random float32 transformers model: hidden 64, MLP 128, 2 layers, 4 heads, 2 kv heads of 16, vocabulary 260."""
    import transformers

    name, extra = FAMILIES[family]
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "tie_word_embeddings": False,
    }
    config = getattr(transformers, name)(**(sizes | extra | overrides))
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim == 1:  # norms and biases that would hide a wrong order if they were constant
                around_zero = family in ("gemma3", "qwen3_5") or "bias" in parameter_name  # their norms add one
                parameter.copy_(torch.rand_like(parameter) + (-0.5 if around_zero else 0.5))
            elif "embed" not in parameter_name:
                parameter.mul_(3)
    return model


def save_checkpoint(folder: Path, model, dtype=torch.bfloat16, tokenizer=True, **save_options) -> Path:
    """Save a model (and the byte tokenizer) as a Hugging Face folder."""
    model.to(dtype).save_pretrained(folder, **save_options)
    if tokenizer:
        byte_tokenizer().save_pretrained(folder)
    return folder


def byte_tokenizer():
    """Ids 0–255 are bytes; 256 bos, 257 eos, 258 pad, 259 unk."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import PreTrainedTokenizerFast

    letters = _byte_letters()
    assert set(letters) == set(ByteLevel.alphabet())
    vocab = {letter: byte for byte, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>", "<eos>", "<pad>", "<unk>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
    )


def _byte_letters() -> list[str]:
    """The printable letter that byte-level BPE writes for each byte (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    letters, extra = [], 0
    for byte in range(256):
        if byte in printable:
            letters.append(chr(byte))
        else:
            letters.append(chr(256 + extra))
            extra += 1
    return letters


@torch.no_grad()
def separate_experts(model):
    """The same model with every expert's weights in linears of its own; a model without experts as it is."""
    from otf_llm.experts import split_experts

    fused = model.state_dict()
    split_experts(model)
    for name, parameter in model.named_parameters():
        layer, _, path = name.partition(".mlp.experts.")
        if path:
            expert, projection, _ = path.split(".")
            stack = fused[f"{layer}.mlp.experts.{'down_proj' if projection == 'down_proj' else 'gate_up_proj'}"]
            matrix = stack[int(expert)]
            half = matrix.shape[0] // 2
            parameter.copy_({"gate_proj": matrix[:half], "up_proj": matrix[half:], "down_proj": matrix}[projection])
    return model


@torch.no_grad()
def logits_of(model, ids: torch.Tensor) -> torch.Tensor:
    """Float32 logits [B, T, V] of a transformers model."""
    return model(input_ids=ids, use_cache=False).logits.float()
