"""Giving a checkpoint the MTP layer back that it lost: new shards beside the old ones, then index, then config.json.

Tools that load a model with transformers drop its MTP layer, which has no class there (791 tensors of GLM-5.2), and
keep num_nextn_predict_layers; sglang then drafts with random weights.

No shard that is there is written to or removed. sglang (0.5.23 model_loader/weight_utils.py:757) and vLLM (0.33
model_loader/weight_utils.py:590) read the files that the index names and no other, so until it is replaced they see the
checkpoint as it was. From then on the target model, which skips the MTP layer's tensors, loads as before; a draft model
that is started before config.json is replaced as well may stop with an error about a shape. The same command, given
again, ends what a kill interrupted.

Of a donor on the Hub only the shards that are needed are fetched, and only once all else is known to fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from glmquant.checkpoint.writer import output_error
from glmquant.engines.targets import Target
from glmquant.graft.donor import Donor, fetched, open_donor
from glmquant.graft.planning import Graft, make_plan
from glmquant.graft.same import check_same, different
from glmquant.graft.writing import alone, write
from glmquant.mxfp4.backend import Backend
from glmquant.streaming import Progress

__all__ = ["Donor", "Graft", "graft", "open_donor"]


def graft(
    donor: Donor,
    folder: Path,
    targets: Sequence[Target],
    form: str = "auto",
    *,
    backends: Sequence[Backend],
    threads: int,
    quantized: bool = False,
    force: bool = False,
    allow_zeros: bool = False,
    dry_run: bool = False,
    progress: Progress = lambda _, __: nullcontext(lambda _: None),
) -> Graft:
    """Add the MTP layer's tensors that a checkpoint lacks, in place.

    What is there of the MTP layer is left alone: if that is only a part, its un-quantized tensors must be the donor's
    to the byte, and the rest is added. The same goes for tensors that the index does not name, and that it then does.

    Args:
        targets, form: for the exclude list, see exclusions.resolve.
        quantized: store the MTP layer's experts in MXFP4 where the checkpoint's main layers have theirs so.
        force: graft although the checkpoints are not of one set of weights (a fine-tune, say).
        progress: told the bytes to come and what is done with them; gives what counts them.

    Raises:
        CheckpointError: the two are not the same model, CKPT's files cannot be trusted, or what it has of the MTP layer
            is not the donor's.
        RecipeError: `quantized`, and the main layers have no MXFP4 experts.
        ExclusionError: no list serves all targets.
        OutputError: the disk is too small, the folder cannot be written, or another process is grafting.
    """
    with nullcontext() if dry_run else alone(folder):
        plan, found = make_plan(donor, folder, targets, form, quantized, force)
        if dry_run or found.nothing_to_do:
            return replace(found, dry_run=dry_run)
        with fetched(donor, found.fetched, folder, plan.disk_needed, progress) as here:
            if plan.unread:
                differ = different(here, plan.checkpoint, plan.unread)
                compared = found.compared + len(plan.unread)
                check_same(here, compared, differ)
                found = replace(found, compared=compared)
            total = sum(job.source.nbytes for shard in plan.shards for job in shard.jobs)
            with progress(total, "grafting") as advance:
                try:
                    backups = write(plan, here, backends, threads, advance, allow_zeros)
                except OSError as err:  # removing what is half-written, say; shards and files have their own messages
                    raise output_error(str(err.filename or folder), err) from err
        return replace(found, backups=tuple(backups))
