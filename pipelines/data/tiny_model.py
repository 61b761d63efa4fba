"""The tiny model from nothing: a Qwen3 of 0.8 M parameters and a tokenizer of one token per character.

`python -m pipelines.data.tiny_model --out DIR` writes an untrained Hugging Face folder; `make tiny-model` fine-tunes it into the
weights that ship in `pipelines/assets/tiny`.
"""

import argparse

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SPECIAL = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<think>", "</think>", "<|unknown|>"]
CHARACTERS = ["\n"] + [chr(code) for code in range(32, 127)]
VOCABULARY = 128
CONTEXT = 1024

CHAT_TEMPLATE = (
    "{%- for message in messages -%}<|{{ message.role }}|>{{ message.content }}"
    "{%- if message.role == 'assistant' -%}<|end|>{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable character, with chat roles as special tokens; an ordinary Hugging Face tokenizer."""
    vocabulary = {token: i for i, token in enumerate(SPECIAL + CHARACTERS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unknown|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        pad_token="<|pad|>",
        unk_token="<|unknown|>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def build_model(seed: int) -> Qwen3ForCausalLM:
    """Random weights: 4 layers of width 128, 4 heads of 32 over 2 key/value heads, tied embeddings."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=SPECIAL.index("<|end|>"),
        pad_token_id=SPECIAL.index("<|pad|>"),
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    build_model(args.seed).save_pretrained(args.out)
    build_tokenizer().save_pretrained(args.out)
    print(f"untrained tiny model written to {args.out}")


if __name__ == "__main__":
    main()
