"""`bexp explore`: a whole exploration in one command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from bexp.api.cli import options
from bexp.api.cli.arguments import AsJson, LogDir, Verbose
from bexp.api.cli.connection import open_stored
from bexp.api.cli.files import read_document
from bexp.api.cli.local_run import LocalRun
from bexp.explorer.formats.cerebras import is_cerebras
from bexp.storage.ids import new_job_id

WorkerDevice = Annotated[
    str | None,
    typer.Option(
        metavar="DEVICES",
        help="cpu, cuda:0, cuda:0-3 or replay:TABLE.",
        show_default="as many GPUs as the request can use, else the CPU",
    ),
]


@options.takes_fields
def explore(
    config: options.Config,
    device: WorkerDevice = None,
    *,
    fields: dict[str, Any],
    target: options.LocalTargetOption = None,
    model: options.ModelOption = None,
    launch: options.LaunchOption = None,
    log_dir: LogDir = None,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> None:
    """Explore a model on this machine and print the best micro_batch_size.

    The log of a Cerebras YAML is also kept below the folder that you stand in, as local_compile_MODE/MODEL/run_ID.log.

    Example: bexp explore config.json --seq-length 4096 --batch-size 512

    Example: bexp explore sft.yaml --trainer axolotl

    Example: bexp explore examples/olmoe-1b-7b.yaml --device cuda:0 --set 'micro_batch_size=[2,4,8]'
    """
    name, _ = options.split_target(target)
    document = read_document(config)
    kind = options.device_kind(device)
    request = options.build_request(config, document, fields, model=model, launch=launch, device_kind=kind, target=name)
    if log_dir is None and is_cerebras(document):
        log_dir = Path.cwd()
    with LocalRun(request, new_job_id(), device, target) as run, open_stored() as stored:
        job = stored.submit(request, job_id=run.job_id, own_worker=run.worker_name)
        raise typer.Exit(run.follow(stored, job, as_json=as_json, verbose=verbose, log_dir=log_dir))
