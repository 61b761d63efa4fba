"""From prompts to token ids, in one place: what filters overlong prompts is what the rollout sees."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Prompt = str | list[dict[str, str]]


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder."""
    from transformers import AutoTokenizer  # seconds, which commands that only print an error need not wait

    return AutoTokenizer.from_pretrained(path)


def render_prompt(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> list[int]:
    """Token ids of a prompt (text, or messages with `role` and `content`) up to where the response begins.

    With a chat template the template decides; without one the contents are joined by newlines and tokenised plainly.
    """
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if tokenizer.chat_template:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return tokenizer(text, add_special_tokens=False)["input_ids"]
    return tokenizer("\n".join(message["content"] for message in messages))["input_ids"]


def stop_ids(model_path: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Every id that ends a response: the generation config's and the tokenizer's, which do not always agree."""
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        file = Path(model_path) / name
        if file.is_file():
            ids |= _as_ids(json.loads(file.read_text()).get("eos_token_id"))
    return sorted(ids | _as_ids(tokenizer.eos_token_id))


def _as_ids(value: Any) -> set[int]:
    if value is None:
        return set()
    return set(value) if isinstance(value, list) else {int(value)}
