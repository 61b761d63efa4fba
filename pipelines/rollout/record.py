"""What came back of one step, until the step is over."""

from collections import Counter
from dataclasses import dataclass, field

import pyarrow as pa

from algorithms.types import Recalled


@dataclass
class StepRecord:
    """What came back of one step, or of its evaluation: kept apart by step, as ranks may already be planning the next."""

    tables: list[pa.Table] = field(default_factory=list)
    row_ids: set[int] = field(default_factory=set)
    spans: dict[str, tuple[float, float]] = field(default_factory=dict)  # first start and last end of each stage, by its metric
    counts: Counter[str] = field(default_factory=Counter)  # what stages have counted, by its metric
    kept: int = 0
    in_order: bool = False  # whether `tables` is the one sorted table
    observed: dict[str, float] | None = None  # what the algorithm said of the groups, once it has seen them
    recalled: Recalled | None = None
    epochs: float = 0.0  # after its last draw of problems

    def take(self, table: pa.Table) -> None:
        """Add a block's groups, each once."""
        new = [i for i, row_id in enumerate(table["row_id"].to_pylist()) if row_id not in self.row_ids]
        table = table.take(pa.array(new, pa.int64()))
        self.tables.append(table)
        self.in_order = False
        self.row_ids.update(table["row_id"].to_pylist())
        self.kept += sum(table["keep"].to_pylist())

    def span(self, name: str, start: float, end: float) -> None:
        """Note when a block was in a stage; a stage's time is from its first block's start to its last block's end."""
        first, last = self.spans.get(name, (start, end))
        self.spans[name] = min(first, start), max(last, end)

    def table(self) -> pa.Table:
        """All groups in their order; sorted once, as an algorithm's memory and the step's end both ask for it."""
        if len(self.tables) > 1 or not self.in_order:
            self.tables, self.in_order = [pa.concat_tables(self.tables).sort_by("row_id").combine_chunks()], True
        return self.tables[0]
