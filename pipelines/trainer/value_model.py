"""The critic as the trainer runs it: any Hugging Face backbone with a value head, sharded by FSDP2, and its updates."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModel, PreTrainedModel

from algorithms.types import CriticModelSettings, Metrics, Sequence, ValueLoss
from algorithms.value_heads import ValueBatch
from pipelines.trainer.batching import pad, split_like
from pipelines.trainer.collectives import Ranks
from pipelines.trainer.config import ModelConfig
from pipelines.trainer.optimizer import Meter, Optimizer, accumulate, column
from pipelines.trainer.policy import distribute, gathered, shard, whole_or_empty
from pipelines.trainer.value_folder import HEAD


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


def load_value_model(config: ModelConfig, outputs: int, mesh: DeviceMesh, device: torch.device) -> ValueModel:
    """A model folder's backbone with the head beside it, or a new one of zeros: it begins by saying the same of every state."""
    backbone = whole_or_empty(AutoModel, config, mesh)
    model = ValueModel(backbone, outputs)
    full: dict[str, Tensor] = {}
    if mesh.get_rank() == 0:
        nn.init.zeros_(model.head.weight), nn.init.zeros_(model.head.bias)
        if (file := Path(config.path) / HEAD).is_file():
            model.head.load_state_dict(load_file(str(file)))
        full = dict(model.state_dict())
    fully_shard(model.head, mesh=mesh)
    shard(model, backbone, mesh, config.dtype)
    return distribute(model, backbone, full, mesh, device, strict=True).train()


class Critic:
    """This rank's shard of the critic, its optimizer, and what the learner asks of it."""

    def __init__(
        self,
        settings: CriticModelSettings,
        config: ModelConfig,
        mesh: DeviceMesh,
        ranks: Ranks,
        *,
        max_tokens: int,
        max_nonfinite_steps: int,
        spent: Callable[[str, float], None],
    ) -> None:
        self.settings, self.config, self.ranks, self.max_tokens, self.spent = settings, config, ranks, max_tokens, spent
        self.model = load_value_model(config, settings.head.outputs, mesh, ranks.device)
        self.optimizer = Optimizer(
            list(self.model.parameters()),
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            clip_grad_norm=settings.clip_grad_norm,
            max_nonfinite_steps=max_nonfinite_steps,
        )
        self.updates = 0  # optimizer steps taken

    @torch.no_grad()
    def store_values(self, batch: list[Sequence]) -> None:
        """The values of a micro-batch's states, before anything is learned from them."""
        values = self.settings.head.values(self._outputs(batch))
        for sequence, own in zip(batch, split_like(values, batch), strict=True):
            sequence.values = own

    def step(self, sequences: list[Sequence], loss: ValueLoss, lr: float) -> Metrics:
        """One step on the loss of the states that the critic learns from, over their number on all ranks; `lr` once warm."""
        started = time.perf_counter()
        sequences = [s for s in sequences if s.critic_mask and s.response_length]
        (states,) = self.ranks.total([sum(s.response_length for s in sequences)])
        if not states:
            return {"critic/empty_minibatches": 1.0}
        meter = Meter(self.ranks)

        def objective(batch: list[Sequence]) -> Tensor:
            outputs = self._outputs(batch)
            per_state, logged = loss(self._value_batch(outputs, batch))
            weight = torch.full_like(per_state, 1.0 / states)
            values = self.settings.head.values(outputs.detach())
            meter.add(per_state, weight, logged | {"critic/vf_loss": per_state, "critic/vpred_mean": values})
            return (per_state * weight).sum() + 0.0 * outputs.sum()  # an empty batch keeps its graph

        accumulate(self.model, sequences, self.max_tokens, self.ranks, objective)
        lr *= min(1.0, (self.updates + 1) / max(self.settings.lr_warmup_steps, 1))
        applied = self.optimizer.apply(lr, meter.loss())
        self.updates += int(not applied["nonfinite_steps"])
        self.spent("update_critic", started)
        return meter.means(int(states)) | {f"critic/{name}": value for name, value in applied.items()}

    def save(self, path: Path) -> None:
        """The critic as a folder that `algorithm.critic.path` takes; collective."""
        full = {name: gathered(value).cpu().contiguous() for name, value in self.model.state_dict().items()}
        if dist.get_rank() == 0:
            path.mkdir(parents=True, exist_ok=True)
            parts = {
                prefix: {name.removeprefix(prefix): value for name, value in full.items() if name.startswith(prefix)}
                for prefix in ("backbone.", "head.")
            }
            save_file(parts["backbone."], str(path / "model.safetensors"), metadata={"format": "pt"})
            save_file(parts["head."], str(path / HEAD))
            for file in Path(self.config.path).iterdir():
                if file.name == "config.json" or file.name.startswith("tokenizer"):
                    shutil.copy(file, path / file.name)

    def _outputs(self, batch: list[Sequence]) -> Tensor:
        padded = pad(batch, self.ranks.device)
        return self.model(padded.input_ids, padded.position_ids, padded.select)

    def _value_batch(self, outputs: Tensor, batch: list[Sequence]) -> ValueBatch:
        def states(arrays: list) -> Tensor:
            return column(arrays, self.ranks.device)

        return ValueBatch(
            outputs=outputs,
            old_values=states([s.values for s in batch]),
            returns=states([s.returns for s in batch]),
            weights=states([[s.critic_weight] * s.response_length for s in batch]),
        )
