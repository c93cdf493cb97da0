"""Whether two checkpoints hold the same weights: bytes of what both have un-quantized are compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby

from glmquant.checkpoint.formats import PLAIN
from glmquant.checkpoint.header import TensorInfo
from glmquant.checkpoint.hub import RangeReader
from glmquant.checkpoint.source import Checkpoint, ShardReader
from glmquant.errors import CheckpointError
from glmquant.graft.donor import Donor

SAMPLE = 64 * 1024
"""Bytes compared of each tensor that both checkpoints hold un-quantized: 85 MB of GLM-5.2."""
HUB_SAMPLES = 256
"""Tensors compared before anything is fetched from the Hub, by a request each."""
_THREADS = 8

Pair = tuple[TensorInfo, TensorInfo]
"""One tensor in the donor and in the checkpoint."""


def comparable(donor: Donor, tensors: Mapping[str, TensorInfo], of_mtp: Sequence[str]) -> Iterator[Pair]:
    """Pairs of one tensor in both checkpoints whose bytes must be equal, the MTP layers' only as far as named.

    Raises:
        CheckpointError: a tensor has another shape.
    """
    chosen = set(of_mtp)
    mtp = set(donor.mtp)
    for name, theirs in donor.offers.items():
        ours = tensors.get(name)
        if ours is None or (name in mtp and name not in chosen):
            continue
        if ours.dtype in PLAIN and ours.shape != theirs.shape:
            raise CheckpointError(
                f"{ours.shard}: tensor {name!r} has shape {list(ours.shape)}, in SRC {list(theirs.shape)}",
                "Take the MTP layer from the model that CKPT was made from.",
            )
        if ours.dtype == theirs.dtype and ours.shape == theirs.shape and ours.nbytes:
            yield theirs, ours


def spread(pairs: Sequence[Pair], count: int) -> list[Pair]:
    """So many of them, evenly."""
    count = min(count, len(pairs))
    return [pairs[k * len(pairs) // count] for k in range(count)]


def different(donor: Donor, checkpoint: Checkpoint, pairs: Sequence[Pair]) -> list[str]:
    """Names of tensors of which a piece differs: the first SAMPLE bytes, or all of a tensor of the MTP layer.

    Raises:
        CheckpointError: one cannot be read.
    """
    mtp, headers = set(donor.mtp), {header.file: header for header in checkpoint.shards}

    def files(pair: Pair) -> tuple[str, str]:
        return pair[0].shard, pair[1].shard

    def compare(group: tuple[tuple[str, str], list[Pair]]) -> list[str]:
        (their_file, our_file), found = group
        with (
            donor.reader(their_file) as theirs,
            ShardReader(checkpoint.folder / our_file, headers[our_file]) as ours,
        ):
            return [a.name for a, b in found if not _same(theirs, ours, a, b, a.nbytes if a.name in mtp else SAMPLE)]

    groups = [(key, list(group)) for key, group in groupby(sorted(pairs, key=files), files)]
    with ThreadPoolExecutor(_THREADS) as pool:
        return sorted(name for names in pool.map(compare, groups) for name in names)


def _same(theirs: ShardReader | RangeReader, ours: ShardReader, a: TensorInfo, b: TensorInfo, most: int) -> bool:
    end = min(a.nbytes, most)
    for start in range(0, end, SAMPLE):
        size = min(SAMPLE, end - start)
        one, two = memoryview(bytearray(size)), memoryview(bytearray(size))
        theirs.read_into(one, a.start + start)
        ours.read_into(two, b.start + start)
        if one != two:
            return False
    return True


def check_same(donor: Donor, compared: int, different: Sequence[str]) -> None:
    """Raise CheckpointError unless something was compared and nothing differs."""
    if own := [name for name in different if donor.is_mtp(name)]:
        raise CheckpointError(
            f"CKPT has a part of the MTP layer, and {len(own)} tensors of it are not SRC's, {own[0]!r} first",
            "An MTP layer of two origins drafts badly: take it from what CKPT was made from, or use --force.",
        )
    if different:
        raise CheckpointError(
            f"SRC and CKPT are not the same weights: {len(different)} of {compared} un-quantized tensors differ, "
            f"{different[0]!r} first",
            "An MTP layer drafts badly for another fine-tune: take it from what CKPT was made from, or use --force.",
        )
    if not compared:
        raise CheckpointError(
            "SRC and CKPT share no un-quantized tensor, so nothing shows that they are the same weights",
            "Fetch more shards of SRC (those with norms or attention), or use --force.",
        )
