"""From prompts to token ids, in one place: what filters overlong prompts is what the rollout sees."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pipelines.data.messages import PromptError, as_messages
from pipelines.data.model_folder import read_model_config

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Prompt = str | list[dict[str, Any]]


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder; ValueError where it has ids, or the model stop tokens, that the embeddings do not."""
    from transformers import AutoTokenizer  # seconds, which commands that only print an error need not wait

    tokenizer = AutoTokenizer.from_pretrained(path)
    rows = _embeddings(path)
    token, largest = max(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    if largest >= rows:
        raise ValueError(
            f"model.path={path}: the tokenizer's {token!r} is id {largest}, but the model has {rows} embeddings: it is another "
            "model's tokenizer, or the embeddings were not resized."
        )
    stops = stop_ids(path, tokenizer)
    if not stops or not all(0 <= one < rows for one in stops):
        raise ValueError(
            f"model.path={path}: its stop tokens are {stops or 'none'}, and the model has ids 0 to {rows - 1}: no response could "
            "end; mend eos_token_id in generation_config.json."
        )
    return tokenizer


def _embeddings(path: str) -> float:
    """How many ids a model has embeddings for, if its configuration says so."""
    file = Path(path) / "config.json"
    found = json.loads(file.read_text()).get("vocab_size") if file.is_file() else None
    return math.inf if found is None else int(found)


def render_prompt(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompt,
    tools: list[dict[str, Any]] | None = None,
    arguments: dict[str, Any] | None = None,
) -> list[int]:
    """Token ids of a prompt (text, or messages with `role` and `content`) up to where the response begins.

    With a chat template the template decides, and `arguments` are variables for it; without one the contents are joined by newlines
    and tokenised plainly. The sequence begins with one BOS at most. PromptError for what cannot be rendered.
    """
    messages = as_messages(prompt)
    if not tokenizer.chat_template:
        if tools:
            raise PromptError("the row has tools, and the model has no chat template that could show them")
        return _one_bos(tokenizer, tokenizer("\n".join(message.get("content", "") for message in messages))["input_ids"])
    text = apply_template(tokenizer, messages, tools, arguments)
    if tools and text == apply_template(tokenizer, messages, None, arguments):
        raise PromptError("the row has tools, and the model's chat template does not show them")
    return _one_bos(tokenizer, tokenizer(text, add_special_tokens=False)["input_ids"])


def apply_template(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None = None,
    arguments: dict[str, Any] | None = None,
) -> str:
    """The messages in the model's turns, up to where its own begins; PromptError with what the template said."""
    try:
        options: dict[str, Any] = {"add_generation_prompt": True, "tokenize": False, **(arguments or {})}
        return str(tokenizer.apply_chat_template(messages, tools=cast(Any, tools), **options))
    except Exception as error:  # templates are programs, and raise what they like
        raise PromptError(f"the model's chat template said: {str(error).splitlines()[0] or type(error).__name__}") from error


def check_template_arguments(tokenizer: PreTrainedTokenizerBase, arguments: dict[str, Any]) -> None:
    """ValueError for a variable that the model's chat template never reads."""
    template = json.dumps(tokenizer.chat_template or "")
    if unread := sorted(name for name in arguments if name not in template):
        raise ValueError(f"task.template_arguments.{unread[0]}: the model's chat template has no variable of this name.")


def _one_bos(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[int]:
    """The ids without a second BOS at the beginning: a template or a text may bring one where the tokenizer adds its own."""
    start = 0
    while ids[start : start + 2] == [tokenizer.bos_token_id] * 2 and tokenizer.bos_token_id is not None:
        start += 1
    return list(ids[start:])


def stop_ids(model_path: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Every id that ends a response: the generation config's and the tokenizer's, which do not always agree."""
    ids = _as_ids(read_model_config(model_path).get("eos_token_id"))
    if (file := Path(model_path) / "generation_config.json").is_file():
        ids |= _as_ids(json.loads(file.read_text()).get("eos_token_id"))
    return sorted(ids | _as_ids(tokenizer.eos_token_id))


def _as_ids(value: Any) -> set[int]:
    if value is None:
        return set()
    return set(value) if isinstance(value, list) else {int(value)}
