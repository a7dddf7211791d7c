"""Generate text with a compiled Llama: a static cache, and one compiled graph for all decode steps.

transformers compiles the decoding step itself if the cache is static; a `CompileConfig` names the
backend. The model has random weights and is small, so that the script runs anywhere in a minute.
For a real one, replace `make_model` by `AutoModelForCausalLM.from_pretrained(...)`.

It prints the number of generated tokens and whether they are the tokens of eager mode:

    8 tokens on cpu, the same as in eager mode: True
"""

from __future__ import annotations

import torch
from transformers import CompileConfig, LlamaConfig, LlamaForCausalLM


def make_model(device: str) -> LlamaForCausalLM:
    """A Llama of one layer with random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).to(device).eval()


def generate(
    model: LlamaForCausalLM, prompt: torch.Tensor, tokens: int, **options: object
) -> torch.Tensor:
    """Append `tokens` tokens to the prompt, [batch, length], greedily."""
    return model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        cache_implementation="static",
        **options,
    )


def main() -> bool:
    """Return whether the compiled model generates what the eager one does."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = make_model(device)
    prompt = torch.randint(1, 512, (2, 16), generator=torch.Generator().manual_seed(1)).to(device)
    expected = generate(model, prompt, 8, disable_compile=True)

    compile_config = CompileConfig(backend="inductor_ext", mode="default")
    # transformers compiles by itself on accelerators only; this asks for it on a CPU too.
    compile_config._compile_all_devices = True
    actual = generate(model, prompt, 8, compile_config=compile_config)

    same = torch.equal(actual, expected)
    print(f"8 tokens on {device}, the same as in eager mode: {same}")
    return same


if __name__ == "__main__":
    main()
