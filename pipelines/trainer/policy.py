"""The policy as the trainer runs it: a Hugging Face causal LM, sharded by FSDP2, that returns log-probabilities and no logits."""

from collections.abc import Iterator
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from pipelines.data.model_folder import has_language_part, read_model_config
from pipelines.trainer.config import LoRAConfig, ModelConfig
from pipelines.weights.base import on_rank_0_cpu

Sharded = TypeVar("Sharded", bound=nn.Module)
LOGIT_ELEMENTS = 1 << 26  # logits that may stand in memory at once: 256 MiB of float32


class Policy(nn.Module):
    """A causal LM whose forward returns the log-probability and entropy of chosen next tokens.

    Only the positions that predict a response token reach the vocabulary, and only `LOGIT_ELEMENTS` logits at a time.
    """

    def __init__(self, lm: PreTrainedModel) -> None:
        super().__init__()
        for name in ("logit_scale", "logits_scaling", "lm_head_multiplier"):
            if getattr(lm.config, name, None) not in (None, 1, 1.0):
                raise ValueError(f"{type(lm).__name__}: models that scale their logits ({name}) are not supported yet.")
        self.lm = lm
        self.lora_scaling = 0.0  # alpha / rank where there are adapters
        self.prefix = "model."  # of its weights in the model folder
        self.softcap: float | None = getattr(lm.config, "final_logit_softcapping", None)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        select: Tensor,
        targets: Tensor,
        temperature: float,
        entropy_grad: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """`input_ids`, `position_ids` [rows, length], right-padded; `select` [tokens] flat positions that predict `targets`.

        Returns log-probabilities and entropies (nats) at the temperature, float32 [tokens]. Right padding needs no attention mask:
        no real token can see what follows it.
        """
        hidden = self.lm.base_model(input_ids=input_ids, position_ids=position_ids, use_cache=False).last_hidden_state
        hidden = hidden.flatten(0, 1)[select]
        head = self.lm.get_output_embeddings()
        size = max(1, LOGIT_ELEMENTS // head.weight.shape[0])
        if len(hidden) <= size:
            return self._head(hidden, head.weight, head.bias, targets, temperature, entropy_grad)
        parts = [
            checkpoint(self._head, h, head.weight, head.bias, t, temperature, entropy_grad, use_reentrant=False)
            for h, t in zip(hidden.split(size), targets.split(size), strict=True)
        ]
        return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])

    def _head(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float, entropy_grad: bool
    ) -> tuple[Tensor, Tensor]:
        logits = nn.functional.linear(hidden, weight, bias).float()
        if self.softcap:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        log_softmax = (logits / temperature).log_softmax(-1)
        chosen = log_softmax.gather(-1, targets[:, None])[:, 0].clone()  # FSDP wants outputs that are no views
        with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
            # x log x at x = 0 would be NaN through -inf; a clamp of the log keeps it 0.
            entropy = -(log_softmax.exp() * log_softmax.clamp(min=-1e9)).sum(-1)
        return chosen, entropy


def load_policy(config: ModelConfig, mesh: DeviceMesh, device: torch.device) -> Policy:
    """Load a model folder and shard it: rank 0 reads the weights, the others start empty and receive their part."""
    lm = whole_or_empty(AutoModelForCausalLM, config, mesh)
    lm.tie_weights()
    if config.lora is not None:
        _add_adapters(lm, config.lora)
    policy = Policy(lm)
    policy.lora_scaling = config.lora.alpha / config.lora.rank if config.lora is not None else 0.0
    if opened_in_part(lm, config):
        policy.prefix = "model.language_model."
    full = {name: value for name, value in policy.state_dict().items()} if mesh.get_rank() == 0 else {}
    shard(policy, lm, mesh, config.dtype)
    return distribute(policy, lm, full, mesh, device, strict=not _tied(lm)).train()


def whole_or_empty(kind: Any, config: ModelConfig, mesh: DeviceMesh) -> PreTrainedModel:
    """The folder's model in float32 on rank 0, one of its shape without weights on the others."""
    if mesh.get_rank() == 0:
        lm = kind.from_pretrained(config.path, dtype=torch.float32, attn_implementation="sdpa")
    else:
        with init_empty_weights(include_buffers=False):
            lm_config = AutoConfig.from_pretrained(config.path)
            lm = kind.from_config(lm_config, dtype=torch.float32, attn_implementation="sdpa")
    if config.gradient_checkpointing:
        lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return lm


def opened_in_part(lm: PreTrainedModel, config: ModelConfig) -> bool:
    """Whether the model is the language part of the folder's, as Qwen3.5 is trained: pictures have no part in it."""
    folder = read_model_config(config.path)
    return has_language_part(folder) and lm.config.model_type == folder["text_config"].get("model_type")


def distribute(
    module: Sharded, backbone: PreTrainedModel, full: dict[str, Tensor], mesh: DeviceMesh, device: torch.device, strict: bool
) -> Sharded:
    """Fill a sharded module with the weights that rank 0 holds; collective."""
    module.to_empty(device=device) if mesh.get_rank() else module.to(device)
    backbone.tie_weights()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=strict)
    set_model_state_dict(module, cast(dict[str, Any], full), options=options)
    for buffer in module.buffers():  # rotary frequencies and the like are in no state dict
        dist.broadcast(buffer, src=0)
    return module


def adapter_config(lora: LoRAConfig) -> Any:
    """The adapters as peft describes them; without dropout, which would make the trainer's probabilities another policy's."""
    from peft import LoraConfig

    targets = lora.target_modules
    return LoraConfig(
        r=lora.rank, lora_alpha=cast(int, lora.alpha), target_modules=targets, lora_dropout=0.0, task_type="CAUSAL_LM"
    )


def _add_adapters(lm: PreTrainedModel, lora: LoRAConfig) -> None:
    """Freeze the model and put trainable adapters beside its linear layers, in place; empty where the model is."""
    from peft import inject_adapter_in_model

    empty = next(lm.parameters()).is_meta
    with torch.random.fork_rng():
        torch.manual_seed(0)  # runs of one configuration start from the same adapters
        inject_adapter_in_model(adapter_config(lora), lm, low_cpu_mem_usage=empty)
    for name, parameter in lm.named_parameters():
        parameter.requires_grad_(".lora_" in name)


def shard(module: nn.Module, backbone: PreTrainedModel, mesh: DeviceMesh, dtype: str) -> None:
    """FSDP2: one shard group per decoder layer, and one for all that is left: embeddings, final norm and head."""
    precision = MixedPrecisionPolicy()
    if dtype == "bfloat16":
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    blocks = set(backbone._no_split_modules or [])
    for layer in [layer for layer in backbone.modules() if type(layer).__name__ in blocks]:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(module, mesh=mesh, mp_policy=precision)


def sync_gradients(module: nn.Module, wanted: bool) -> None:
    """Whether the next backward reduces gradients over the ranks (the last micro-batch) or only accumulates them."""
    cast(FSDPModule, module).set_requires_gradient_sync(wanted)


def _tied(lm: PreTrainedModel) -> bool:
    return lm.get_output_embeddings().weight is lm.get_input_embeddings().weight


def hf_weights(policy: Policy, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """All weights under their Hugging Face names, tied ones once and adapters merged, gathered one at a time; collective."""
    state = policy.state_dict()
    tied = _tied(policy.lm)
    for name, value in state.items():
        if ".lora_" in name or (tied and name == "lm.lm_head.weight"):
            continue
        full = gathered(value)
        stem = name.removesuffix(".base_layer.weight")
        if stem != name:
            up, down = gathered(state[f"{stem}.lora_B.default.weight"]), gathered(state[f"{stem}.lora_A.default.weight"])
            full = full + policy.lora_scaling * (up @ down)
        name = name.removeprefix("lm.").replace(".base_layer", "")
        yield policy.prefix + name.removeprefix("model.") if name.startswith("model.") else name, full.to(dtype)


def gathered(value: Any) -> Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


class NamedWeights:
    """The policy's weights as an iterable of named tensors; each pass gathers them anew, and is collective."""

    def __init__(self, policy: Policy, dtype: torch.dtype) -> None:
        self._policy, self._dtype = policy, dtype

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return hf_weights(self._policy, self._dtype)


def full_state_dict(policy: Policy, dtype: torch.dtype) -> dict[str, Tensor]:
    """The weights of `hf_weights` on the CPU of rank 0 (empty on other ranks); collective."""
    return on_rank_0_cpu(hf_weights(policy, dtype))
