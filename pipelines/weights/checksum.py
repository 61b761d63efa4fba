"""A checksum of weights that survives renaming, fusing and reordering."""

from collections.abc import Iterable

import torch


def weights_checksum(tensors: Iterable[torch.Tensor]) -> str:
    """Sums of all bit patterns and of their squares modulo 2^64, and the count of nonzero ones, in hexadecimal.

    Engines fuse projections (q, k and v into one), so tensors cannot be compared one by one; these sums are the same for any
    arrangement of the same numbers, and zero padding adds nothing.
    """
    first = second = count = 0
    for tensor in tensors:
        bits = tensor.detach().contiguous().view(torch.int32 if tensor.element_size() == 4 else torch.int16).flatten().long()
        first, second = first + int(bits.sum()), second + int((bits * bits).sum())
        count += int((bits != 0).sum())
    return f"{first % 2**64:016x}{second % 2**64:016x}{count:010x}"
