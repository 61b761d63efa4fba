"""The value model as the trainer runs it: any Hugging Face backbone with a value head, sharded by FSDP2."""

import shutil
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel

from algorithms.types import ValueModelSpec
from pipelines.data.model_folder import has_language_part, read_model_config
from pipelines.trainer.config import ModelConfig
from pipelines.trainer.policy import distribute, gathered, shard, whole_or_empty
from pipelines.trainer.value_folder import HEAD

INITIALIZER_RANGE = 0.02  # of backbones that do not say


class ValueModel(nn.Module):
    """A backbone whose head says what the state after each token is worth. The head is float32, whatever the backbone is."""

    def __init__(self, backbone: PreTrainedModel, outputs: int) -> None:
        super().__init__()
        self.backbone = backbone
        device = next(backbone.parameters()).device
        self.head = nn.Linear(backbone.config.get_text_config().hidden_size, outputs, dtype=torch.float32, device=device)

    def forward(self, input_ids: Tensor, position_ids: Tensor, select: Tensor) -> Tensor:
        """`input_ids`, `position_ids` [rows, length], right-padded; `select` [tokens] flat positions. Outputs [tokens, outputs]."""
        hidden = self.backbone(input_ids=input_ids, position_ids=position_ids, use_cache=False).last_hidden_state
        return self.head(hidden.flatten(0, 1)[select].float())


def load_value_model(config: ModelConfig, spec: ValueModelSpec, mesh: DeviceMesh, device: torch.device) -> ValueModel:
    """A model folder's backbone with the head beside it, or a new head.

    A new one is of zeros, and begins by saying the same of every state, or drawn from its seed: normal, as wide as the backbone
    draws its own weights.
    """
    folder = read_model_config(config.path)
    # Of a model that also sees pictures the language model, which transformers opens with its head.
    kind = AutoModelForCausalLM if has_language_part(folder) else AutoModel
    backbone = cast(PreTrainedModel, whole_or_empty(kind, config, mesh).base_model)
    model = ValueModel(backbone, spec.head.outputs)
    full: dict[str, Tensor] = {}
    if mesh.get_rank() == 0:
        nn.init.zeros_(model.head.weight), nn.init.zeros_(model.head.bias)
        if spec.head_seed is not None:
            width = float(getattr(backbone.config.get_text_config(), "initializer_range", INITIALIZER_RANGE))
            drawn = torch.randn(model.head.weight.shape, generator=torch.Generator().manual_seed(spec.head_seed))
            model.head.weight.data.copy_(drawn * width)
        if (file := Path(config.path) / HEAD).is_file():
            model.head.load_state_dict(load_file(str(file)))
        full = dict(model.state_dict())
    fully_shard(model.head, mesh=mesh)
    shard(model, backbone, mesh, config.dtype)
    return distribute(model, backbone, full, mesh, device, strict=True).train()


def save_value_model(model: ValueModel, path: Path, began_as: str) -> None:
    """The value model as a folder that `algorithm.critic.path` takes; collective. `began_as` has its tokenizer."""
    full = {name: gathered(value).cpu().contiguous() for name, value in model.state_dict().items()}
    if dist.get_rank() == 0:
        path.mkdir(parents=True, exist_ok=True)
        parts = {
            prefix: {name.removeprefix(prefix): value for name, value in full.items() if name.startswith(prefix)}
            for prefix in ("backbone.", "head.")
        }
        save_file(parts["backbone."], str(path / "model.safetensors"), metadata={"format": "pt"})
        save_file(parts["head."], str(path / HEAD))
        model.backbone.config.save_pretrained(path)
        for file in Path(began_as).iterdir():
            if file.name.startswith("tokenizer"):
                shutil.copy(file, path / file.name)
