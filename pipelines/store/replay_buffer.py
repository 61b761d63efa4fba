"""The replay buffer: complete trajectories in Parquet files, first in first out, on a disk or behind any fsspec URL.

An append writes one new file and then the index, so a crash loses nothing that was confirmed and shows nothing that was not. A trim
moves a mark in the index and rewrites nothing. Only small columns are held in memory: a sample reads the row groups it cuts from.
"""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from algorithms.types import Problem, StoredTrajectory
from pipelines.store.buffer_index import INDEX, check_index, check_owner, first_sequence, read_index
from pipelines.store.trajectories import SCHEMA, ReplayError, check_alignment
from pipelines.store.whole_file import sync_folder

ROW_GROUP_TOKENS = 1 << 19  # what one sample reads at most, unless a single trajectory is longer

_PROBLEM = ["problem_id", "data_source", "prompt_ids", "ground_truth", "extra_info"]
_LIGHT = ["sequence", "problem_id", "response_length", "reward", "step"]


@dataclass(frozen=True)
class ReplayBufferConfig:
    """Where a run keeps its trajectories; `conf/config.yaml` says what each key is."""

    url: str | None
    start_from: str | None


@dataclass(frozen=True)
class Place:
    """Where a trajectory lies."""

    file: str
    row_group: int
    row: int


class ReplayBuffer:
    """The newest `capacity` trajectories under a URL, and the latest of each problem, which is not sampled once it has left.

    `state()` and `view` carry it through checkpoints.
    """

    def __init__(self, url: str, capacity: int, tokenizer_hash: str, view: dict[str, Any] | None = None) -> None:
        self.url, self.capacity, self.tokenizer_hash = url, capacity, tokenizer_hash
        self.skipped: list[str] = []  # files that could not be read, with the reason
        self._fs, self._root = fsspec.core.url_to_fs(url)
        self._fs.makedirs(self._root, exist_ok=True)
        self._files: list[str] = []  # of what the buffer holds
        self._older: list[str] = []  # files whose trajectories have left but for a problem's latest
        self._unread: list[str] = []  # those that could not be read this time
        self._older_unread: list[str] = []
        self._next = 0
        self._entries: list[StoredTrajectory] = []  # oldest first
        self._latest: dict[str, StoredTrajectory] = {}  # by problem
        self._places: dict[int, Place] = {}  # where each trajectory lies, by its sequence
        if view is not None:
            self._open(view)

    @classmethod
    def copy_of(
        cls, source: str, url: str, capacity: int, tokenizer_hash: str, view: dict[str, Any] | None = None
    ) -> "ReplayBuffer":
        """A buffer that begins with what another one holds, or held when a checkpoint took this view of it.

        ReplayError if there is none or its tokenizer is another.
        """
        index = view if view is not None else read_index(source)
        _check_tokenizer(source, index, tokenizer_hash)
        fs, root = fsspec.core.url_to_fs(source)
        copy = cls(url, capacity, tokenizer_hash)
        for name in [*index["latest"], *index["files"]]:
            with fs.open(f"{root}/{name}", "rb") as old, copy._fs.open(f"{copy._root}/{name}", "wb") as new:
                shutil.copyfileobj(old, new)
        copy._open(index)
        copy._write_index()
        return copy

    def trajectories(self) -> list[StoredTrajectory]:
        """What the buffer holds, oldest first."""
        return list(self._entries)

    def latest(self) -> dict[str, StoredTrajectory]:
        """The latest trajectory of each problem that was ever stored, by problem; those that have left the buffer among them."""
        return dict(self._latest)

    def prefix(self, trajectory: StoredTrajectory, cut: int) -> list[int]:
        """The first `cut` response tokens of a trajectory."""
        if not cut:
            return []
        place = self._places[trajectory.sequence]
        group = _read_row_group(self._fs, f"{self._root}/{place.file}", place.row_group)
        return group["response_ids"][place.row].values[:cut].to_pylist()

    def response(self, sequence: int) -> list[int]:
        """The whole response of a stored trajectory."""
        place = self._places[sequence]
        return _read_row_group(self._fs, f"{self._root}/{place.file}", place.row_group)["response_ids"][place.row].as_py()

    def problem(self, trajectory: StoredTrajectory) -> Problem:
        """The problem of a stored trajectory, which needs no dataset to be posed again."""
        place = self._places[trajectory.sequence]
        with self._fs.open(f"{self._root}/{place.file}", "rb") as stream:
            row = pq.ParquetFile(stream).read_row_group(place.row_group, columns=_PROBLEM).slice(place.row, 1).to_pylist()[0]
        return Problem(**row)

    def append(self, table: pa.Table) -> None:
        """Add trajectories (columns of `SCHEMA` but `sequence` and `tokenizer_hash`); the oldest beyond the capacity leave."""
        if not table.num_rows:
            return
        sequences = pa.array(range(self._next, self._next + table.num_rows), pa.int64())
        table = table.append_column("sequence", sequences)
        table = table.append_column("tokenizer_hash", pa.array([self.tokenizer_hash] * table.num_rows)).select(SCHEMA.names)
        check_alignment(table)
        name = f"trajectories-{self._next:012d}.parquet"
        self._write_table(table, name)
        _read_row_group.cache_clear()  # a trainer that starts again writes files of the same names anew
        self._files.append(name)
        self._next += table.num_rows
        self._take(name, table.select(_LIGHT), _group_sizes(table))
        self._trim()
        self._write_index()

    def state(self) -> dict[str, Any]:
        """The index: which files and which of their trajectories are the buffer now, and which others hold a problem's latest."""
        oldest = self._entries[0].sequence if self._entries else self._next
        files = sorted([*self._files, *self._unread])
        index = {"tokenizer_hash": self.tokenizer_hash, "files": files, "latest": sorted([*self._older, *self._older_unread])}
        return index | {"oldest": oldest, "next": self._next}

    def collect(self, kept: Iterable[str]) -> list[str]:
        """Delete this buffer's files that neither it nor `kept` (files of checkpoints) names; returns them."""
        wanted = {*self._files, *self._older, *self._unread, *self._older_unread, *kept}
        found = [os.path.basename(path) for path in self._fs.glob(f"{self._root}/trajectories-*.parquet")]
        dropped = [name for name in found if name not in wanted]
        for name in dropped:
            self._fs.rm_file(f"{self._root}/{name}")
        return dropped

    # -- files -------------------------------------------------------------------------------------------------------

    def _open(self, view: dict[str, Any]) -> None:
        _check_tokenizer(self.url, check_index(self.url, view), self.tokenizer_hash)
        for name in sorted([*view["latest"], *view["files"]]):
            try:
                with self._fs.open(f"{self._root}/{name}", "rb") as stream:
                    file = pq.ParquetFile(stream)
                    sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
                    light = file.read(columns=_LIGHT)
                _check_rows(name, light)
            except (OSError, KeyError, pa.ArrowException, ReplayError) as error:
                self.skipped.append(f"{self.url}/{name}: {(str(error) or type(error).__name__).splitlines()[0]}")
                # It stays in the index: next time it may be readable.
                (self._older_unread if name in view["latest"] else self._unread).append(name)
                continue
            self._files.append(name)
            self._take(name, light, sizes)
        self._next = view["next"]
        self._trim(view["oldest"])

    def _take(self, name: str, light: pa.Table, group_sizes: list[int]) -> None:
        places = [Place(name, group, row) for group, size in enumerate(group_sizes) for row in range(size)]
        for row, place in zip(light.to_pylist(), places, strict=True):
            entry = StoredTrajectory(row["sequence"], row["problem_id"], row["response_length"], row["reward"], row["step"])
            self._entries.append(entry)
            self._latest[entry.problem_id] = entry
            self._places[entry.sequence] = place

    def _trim(self, oldest: int = 0) -> None:
        live = [entry for entry in self._entries if entry.sequence >= oldest][-self.capacity :]
        self._places = {entry.sequence: self._places[entry.sequence] for entry in [*live, *self._latest.values()]}
        self._entries = live
        files = {self._places[entry.sequence].file for entry in live}
        self._files = [name for name in self._files if name in files]
        self._older = sorted({place.file for place in self._places.values()} - files)
        self._unread = [name for name in self._unread if not self._files or name > self._files[0]]

    def _write_table(self, table: pa.Table, name: str) -> None:
        temporary = f"{self._root}/.{name}.tmp"
        with self._fs.open(temporary, "wb") as stream, pq.ParquetWriter(stream, SCHEMA, **_WRITE) as writer:
            start = 0
            for size in _group_sizes(table):
                writer.write_table(table.slice(start, size))
                start += size
            writer.close()
            _flush(stream)
        self._name(temporary, name)

    def _write_index(self) -> None:
        temporary = f"{self._root}/.{INDEX}.tmp"
        with self._fs.open(temporary, "w") as stream:
            json.dump(self.state(), stream)
            _flush(stream)
        self._name(temporary, INDEX)

    def _name(self, temporary: str, name: str) -> None:
        """Give a whole file the name under which others look for it."""
        self._fs.mv(temporary, f"{self._root}/{name}")
        if "file" in self._fs.protocol:
            sync_folder(Path(self._root))


_WRITE: dict[str, Any] = {"compression": "zstd", "use_dictionary": ["problem_id", "data_source", "tokenizer_hash", "finish_reason"]}


def holds(url: str, view: dict[str, Any]) -> bool:
    """Whether any of the files of a view are at a URL; a run's folder may have moved since the view was taken."""
    fs, root = fsspec.core.url_to_fs(url)
    return not view["files"] or any(fs.exists(f"{root}/{name}") for name in view["files"])


def live_rows(url: str) -> tuple[list[str], int]:
    """A buffer's files, and the least `sequence` of the rows that are still in it: older ones have left and are not rewritten."""
    index = read_index(url)
    return [f"{url.rstrip('/')}/{name}" for name in index["files"]], index["oldest"]


def tokenizer_hash(tokenizer: Any) -> str:
    """A fingerprint of what token ids mean: vocabulary, merges and added tokens, not the chat template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        whole = json.loads(backend.to_str())
        meaning = json.dumps([whole["model"], whole["added_tokens"]], sort_keys=True)
    else:
        meaning = json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(meaning.encode()).hexdigest()[:16]


def check_place(config: ReplayBufferConfig, expected: str, run: str) -> None:
    """ReplayError if the buffer to begin with is missing, of another tokenizer or this run's own, or `url` is another run's."""
    if config.start_from is not None:
        if same_place(config.start_from, config.url or f"{run}/replay"):
            raise ReplayError(
                f"replay_buffer.start_from={config.start_from}: this run's own buffer; leave it out, or give another."
            )
        _check_tokenizer(config.start_from, read_index(config.start_from), expected)
    if config.url is not None:
        check_owner(config.url, run)


def same_place(one: str, other: str) -> bool:
    """Whether two URLs name the same folder."""
    (fs, path), (other_fs, other_path) = fsspec.core.url_to_fs(one), fsspec.core.url_to_fs(other)
    local = "file" in fs.protocol
    return fs == other_fs and (os.path.realpath(path) == os.path.realpath(other_path) if local else path == other_path)


def _check_rows(name: str, light: pa.Table) -> None:
    """ReplayError unless a file has the rows that it was written with, each once and whole."""
    first = first_sequence(name)
    if light["sequence"].to_pylist() != list(range(first, first + light.num_rows)):
        raise ReplayError("rows are missing, doubled or null")
    if any(light[column].null_count for column in ("problem_id", "response_length", "step")):
        raise ReplayError("a row has no problem, length or step")


def _check_tokenizer(url: str, index: dict[str, Any], expected: str) -> None:
    if index["tokenizer_hash"] != expected:
        raise ReplayError(
            f"{url}: made with tokenizer {index['tokenizer_hash']}, but the model's is {expected}; token ids mean something else."
        )


def _group_sizes(table: pa.Table) -> list[int]:
    """Rows per row group: as many as hold `ROW_GROUP_TOKENS` response tokens, at least one."""
    sizes, tokens = [0], 0
    for length in table["response_length"].to_pylist():
        if sizes[-1] and tokens + length > ROW_GROUP_TOKENS:
            sizes.append(0)
            tokens = 0
        sizes[-1] += 1
        tokens += length
    return sizes


def _flush(stream: Any) -> None:
    """Have the disk keep what was written, before the file gets the name under which others look for it."""
    stream.flush()
    with contextlib.suppress(OSError, AttributeError):  # no file of this machine
        os.fsync(stream.fileno())


@lru_cache(maxsize=4)  # several cuts of one step may fall into the same row group
def _read_row_group(fs: Any, path: str, group: int) -> pa.Table:
    with fs.open(path, "rb") as stream:
        return pq.ParquetFile(stream).read_row_group(group, columns=["response_ids"])
