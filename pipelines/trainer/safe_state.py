"""Reading sharded state without running what is in it: a checkpoint may come from anyone, and pickles can call anything."""

import io
import pickle
from pathlib import PurePosixPath
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

from pipelines.store.checkpoint import CheckpointError

# All that the metadata of tensors and plain values is made of.
_KNOWN = {
    "torch.distributed.checkpoint.metadata": {
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
        *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", "float32", "float16", "bfloat16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool"},
    "pathlib": {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
    "collections": {"OrderedDict"},
}


class _Metadata(pickle.Unpickler):
    """Makes the parts of checkpoint metadata, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in _KNOWN.get(module, ()):
            raise CheckpointError(f"its metadata wants {module}.{name}, which is no part of tensors")
        return super().find_class(module, name)


class SafeReader(FileSystemReader):
    """A reader of sharded state; CheckpointError for metadata that would run code or read files elsewhere."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = self._get_metadata_path(kwargs.get("rank"))
        try:
            with self.fs.create_stream(path, "rb") as stream:
                metadata = _Metadata(stream).load()
            if not isinstance(metadata, Metadata):
                raise CheckpointError("its metadata describes no state")
            for info in (metadata.storage_data or {}).values():
                if PurePosixPath(info.relative_path).name != info.relative_path:
                    raise CheckpointError(f"its metadata names the file {info.relative_path!r}, which lies elsewhere")
        except (CheckpointError, pickle.UnpicklingError, EOFError, OSError, AttributeError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path}: cannot be read safely ({str(error) or type(error).__name__}).") from None
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        assert metadata.storage_meta is not None
        metadata.storage_meta.load_id = self.load_id
        return metadata


def load_state(state: dict[str, Any], reader: SafeReader) -> None:
    """Fill a state from a checkpoint; collective. CheckpointError says in a sentence why it cannot be."""
    try:
        dcp.load(state, storage_reader=reader, planner=_SafePlanner(), no_dist=not dist.is_initialized())
    except CheckpointException as error:
        (rank, (cause, _)), *_ = error.failures.items()
        text = (str(cause) or type(cause).__name__).splitlines()[0]
        raise CheckpointError(f"{reader.path}: the state of rank {rank} cannot be read ({text[:200]}).") from None


class _SafePlanner(DefaultLoadPlanner):
    """Loads values that are no tensors (step counts, rates) as weights are loaded: nothing of them is called."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        loaded = torch.load(value, weights_only=True)
        set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], loaded)
