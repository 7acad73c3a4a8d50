"""Public models: the figures of their `config.json`, and how many parameters they have by their own count."""

from collections.abc import Mapping
from typing import NamedTuple


class Public(NamedTuple):
    """A model that everybody can look up."""

    name: str
    config: Mapping[str, object]
    parameters: int

    def __str__(self) -> str:
        return self.name


def llama_like(
    kind: str, hidden: int, intermediate: int, layers: int, vocab: int, heads: int, kv_heads: int, **rest: object
) -> Mapping[str, object]:
    """Write a configuration with the keys that most families share."""
    return {
        "model_type": kind,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "vocab_size": vocab,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        **rest,
    }


def gpt2(hidden: int, layers: int, heads: int) -> Mapping[str, object]:
    """Write a configuration of GPT-2's kind."""
    return {
        "model_type": "gpt2",
        "n_embd": hidden,
        "n_layer": layers,
        "n_head": heads,
        "n_inner": None,
        "vocab_size": 50257,
        "n_positions": 1024,
    }


LLAMA_3 = Public("Llama-3-8B", llama_like("llama", 4096, 14336, 32, 128256, 32, 8), 8_030_261_248)
GPT2 = Public("GPT-2", gpt2(768, 12, 12), 124_439_808)
MISTRAL = Public(
    "Mistral-7B-v0.1", llama_like("mistral", 4096, 14336, 32, 32000, 32, 8, sliding_window=4096), 7_241_732_096
)
GEMMA_2 = Public("Gemma-2-2B", llama_like("gemma2", 2304, 9216, 26, 256000, 8, 4, head_dim=256), 2_614_341_888)
MIXTRAL = Public(
    "Mixtral-8x7B",
    llama_like("mixtral", 4096, 14336, 32, 32000, 32, 8, num_local_experts=8, num_experts_per_tok=2),
    46_702_792_704,
)

PUBLIC = (
    Public("Llama-2-7B", llama_like("llama", 4096, 11008, 32, 32000, 32, 32), 6_738_415_616),
    Public("Llama-2-13B", llama_like("llama", 5120, 13824, 40, 32000, 40, 40), 13_015_864_320),
    Public("Llama-2-70B", llama_like("llama", 8192, 28672, 80, 32000, 64, 8), 68_976_648_192),
    LLAMA_3,
    Public("Llama-3-70B", llama_like("llama", 8192, 28672, 80, 128256, 64, 8), 70_553_706_496),
    Public("Llama-3.2-1B", llama_like("llama", 2048, 8192, 16, 128256, 32, 8, tie_word_embeddings=True), 1_235_814_400),
    MISTRAL,
    MIXTRAL,
    Public("Qwen2-7B", llama_like("qwen2", 3584, 18944, 28, 152064, 28, 4), 7_615_616_512),
    Public("Qwen2-0.5B", llama_like("qwen2", 896, 4864, 24, 151936, 14, 2, tie_word_embeddings=True), 494_032_768),
    Public(
        "Qwen1.5-MoE-A2.7B",
        llama_like(
            "qwen2_moe",
            2048,
            5632,
            24,
            151936,
            16,
            16,
            moe_intermediate_size=1408,
            shared_expert_intermediate_size=5632,
            num_experts=60,
            num_experts_per_tok=4,
        ),
        14_315_784_192,
    ),
    Public("Qwen3-8B", llama_like("qwen3", 4096, 12288, 36, 151936, 32, 8, head_dim=128), 8_190_735_360),
    Public(
        "Qwen3-30B-A3B",
        llama_like(
            "qwen3_moe",
            2048,
            6144,
            48,
            151936,
            32,
            4,
            head_dim=128,
            moe_intermediate_size=768,
            num_experts=128,
            num_experts_per_tok=8,
        ),
        30_532_122_624,
    ),
    Public("Gemma-2B", llama_like("gemma", 2048, 16384, 18, 256000, 8, 1, head_dim=256), 2_506_172_416),
    Public("Gemma-7B", llama_like("gemma", 3072, 24576, 28, 256000, 16, 16, head_dim=256), 8_537_680_896),
    GEMMA_2,
    Public("Gemma-2-9B", llama_like("gemma2", 3584, 14336, 42, 256000, 16, 8, head_dim=256), 9_241_705_984),
    Public("Phi-2", llama_like("phi", 2560, 10240, 32, 51200, 32, 32), 2_779_683_840),
    Public("Phi-3-mini", llama_like("phi3", 3072, 8192, 32, 32064, 32, 32), 3_821_079_552),
    GPT2,
    Public("GPT-2 medium", gpt2(1024, 24, 16), 354_823_168),
    Public("GPT-2 large", gpt2(1280, 36, 20), 774_030_080),
    Public("GPT-2 XL", gpt2(1600, 48, 25), 1_557_611_200),
)
