"""What a judging model is shown: a template, and texts that are fenced as data.

Nothing in a candidate's text can end its fence, because the fence is named by a digest of the texts themselves, and nothing in it
is a token of the judge's chat template, because such tokens are broken up.
"""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from serve.verifiers.answer_form import after_thinking

SHIPPED = Path(__file__).parent / "prompts"
FIELDS = ("problem", "response", "reference", "guidelines")
# Tokens of chat templates: what looks like one is text here, whatever the server's tokenizer makes of it.
TAGS = "s|think|thinking|bos|eos|start_of_turn|end_of_turn|im_start|im_end"
TEMPLATE_TOKENS = re.compile(rf"<(?=[|\uff5c]|/?(?:{TAGS})>)|\[(?=/?INST\])", re.IGNORECASE)
POINTS = re.compile(r"<points>\s*(\d{1,3})\s*</points>")


class PromptFileError(ValueError):
    """A file of prompts that cannot be used."""


@dataclass(frozen=True)
class JudgePrompt:
    """A template of messages with `{problem}`, `{response}`, `{reference}` and `{guidelines}`, and how many points there are."""

    system: str
    user: str
    points: int
    block: re.Pattern[str] | None  # what of the response is judged, the last match; None is all that follows the thinking

    @classmethod
    def read(cls, name: str) -> "JudgePrompt":
        """The prompt in a file, or `builtin:NAME` for one that ships; PromptFileError in one sentence."""
        path = SHIPPED / f"{name.removeprefix('builtin:')}.yaml" if name.startswith("builtin:") else Path(name)
        if not path.is_file():
            shipped = ", ".join(f"builtin:{file.stem}" for file in sorted(SHIPPED.glob("*.yaml")))
            raise PromptFileError(f"task.model_judge: prompt={name}: no such file; {shipped} are shipped.")
        try:
            tree = yaml.safe_load(path.read_text())
            block = re.compile(tree["block"]) if tree.get("block") else None
            found = cls(str(tree["system"]), str(tree["user"]), int(tree["points"]), block)
        except (yaml.YAMLError, KeyError, TypeError, ValueError, re.error) as error:
            raise PromptFileError(f"task.model_judge: prompt={name}: needs system, user and points ({error}).") from error
        if "{response}" not in found.user:
            raise PromptFileError(f"task.model_judge: prompt={name}: its user message has no {{response}}.")
        return found

    @property
    def needs(self) -> tuple[str, ...]:
        """What a row must bring to be judged by this prompt."""
        return tuple(name for name in FIELDS if name != "response" and f"{{{name}}}" in self.user)

    def lacks(self, ground_truth: Any, extra_info: dict[str, Any]) -> str | None:
        """The first text that a row does not bring; None if it has all."""
        known = texts_of(ground_truth, extra_info)
        return next((name for name in self.needs if not known.get(name)), None)

    def answer_in(self, response: str) -> str | None:
        """The part of a response that is judged; None if there is none, or the thinking has not ended."""
        final = after_thinking(response)
        if final is None or self.block is None:
            return final
        found = list(self.block.finditer(final))
        return (found[-1][found[-1].lastindex or 0]).strip() or None if found else None

    def messages(self, texts: dict[str, str]) -> list[dict[str, str]]:
        """Both messages with the texts in their fences."""
        clean = {name: harmless(text) for name, text in texts.items()}
        mark = hashlib.sha256("\0".join(clean.get(name, "") for name in FIELDS).encode()).hexdigest()[:16]

        def fenced(match: re.Match[str]) -> str:
            title = f"{match[1].upper()} {mark}"
            return f"<<<{title}\n{clean[match[1]]}\n{title}>>>"

        user = re.sub(rf"\{{({'|'.join(FIELDS)})\}}", fenced, self.user)
        return [{"role": "system", "content": self.system}, {"role": "user", "content": user}]

    def read_answer(self, reply: str) -> float:
        """The points as a part of all, from the reply's last line alone, so that what is quoted above it does not count.

        ValueError if the line is not exactly that.
        """
        lines = [line.strip() for line in reply.splitlines() if line.strip()]
        found = POINTS.fullmatch(lines[-1]) if lines else None
        if found is None:
            raise ValueError(f"its last line is no <points>N</points>: {(lines[-1] if lines else '')[:80]!r}")
        if int(found[1]) > self.points:
            raise ValueError(f"{found[1]} points of {self.points}")
        return int(found[1]) / self.points


def texts_of(ground_truth: Any, extra_info: dict[str, Any]) -> dict[str, str]:
    """The texts of a row by the names that templates use: the truth is the reference solution."""
    known = {"reference": ground_truth, **{name: extra_info.get(name) for name in ("problem", "guidelines")}}
    return {name: text for name, text in known.items() if isinstance(text, str) and text.strip()}


def harmless(text: str) -> str:
    """A text that UTF-8 can carry and that holds no token of a chat template."""
    text = text.replace("\0", "").encode("utf-8", "replace").decode()
    return TEMPLATE_TOKENS.sub(lambda match: match[0] + "\u200b", text)
