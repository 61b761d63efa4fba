"""What runs inside vLLM's worker processes: loading weights while counting the bits that arrive."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file

from pipelines.weights.checksum import weights_checksum


class WeightLoader:
    """Mixed into vLLM's worker (`worker_extension_cls`), so `self` is the worker."""

    model_runner: Any
    vllm_config: Any

    def load_checkpoint_weights(self, path: str) -> dict[str, str]:
        """Replace the weights by those of a folder's safetensors; returns checksums of what was read and what is resident.

        `resident` is empty where it cannot be compared: kernels that keep weights packed in a layout of their own (oneDNN on CPUs),
        shards of a tensor-parallel engine, quantised weights, and weights of several precisions (a hybrid model's decay rates are
        float32).
        """
        arrived: list[torch.Tensor] = []

        def weights() -> Iterator[tuple[str, torch.Tensor]]:
            for file in sorted(Path(path).glob("*.safetensors")):
                for name, tensor in load_file(file).items():
                    arrived.append(tensor)
                    yield name, tensor

        self.model_runner.reload_weights(weights_iterator=weights())
        model = self.model_runner.get_model()
        _repack_tied_heads(model)
        resident = list(model.parameters())
        whole = self.vllm_config.parallel_config.tensor_parallel_size == 1 and self.vllm_config.model_config.quantization is None
        plain = whole and all(tensor.numel() for tensor in resident) and len({tensor.dtype for tensor in resident}) == 1
        return {"read": weights_checksum(arrived), "resident": weights_checksum(resident) if plain else ""}


def _repack_tied_heads(model: torch.nn.Module) -> None:
    """Renew what CPU kernels derived from weights that vLLM's reload does not process again.

    A head tied to the embedding has no weights of its own in a checkpoint, so vLLM 0.32 reloads the embedding and leaves the head's
    packed copy (oneDNN) as it was: logits would come from the old head for ever. Layers whose weights were packed and freed have
    been reloaded properly.
    """
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    for module in model.modules():
        if getattr(module, "cpu_linear", None) is not None and cast(torch.Tensor, module.weight).numel():
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)
