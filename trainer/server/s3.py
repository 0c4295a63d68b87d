"""The AWS CLI, which copies checkpoints to S3 and back in ART's layout."""

import asyncio
import logging
import shutil

from kit.state_dir import CHECKPOINTS, MODELS, STEP_NAME
from trainer.errors import BadRequest, NotFound, Unsupported
from trainer.processes.worker import environment_without_keys

logger = logging.getLogger(__name__)

# Unfinished checkpoints and the journal belong to the server that writes them.
OWN_FILES = ("--exclude", "journal*", "--exclude", f"{CHECKPOINTS}/.*")


def path_of(bucket: str | None, prefix: str | None, project: str, name: str) -> str:
    if bucket is None:
        raise BadRequest("No S3 bucket is named", hint="Set `s3_bucket`")
    parts = [part for part in (prefix or "").split("/") if part]
    if ".." in parts:
        raise BadRequest(f"The prefix `{prefix}` leaves its bucket", hint="Remove the `..`")
    return "/".join([f"s3://{bucket}", *parts, project, MODELS, name])


async def latest_step(s3: str) -> int:
    listing = await aws("s3", "ls", f"{s3}/{CHECKPOINTS}/")
    names = [line.split()[-1].strip("/") for line in listing.splitlines() if line.strip()]
    steps = [name for name in names if STEP_NAME.fullmatch(name)]
    if not steps:
        raise NotFound(f"There is no checkpoint in `{s3}`", hint="Check the bucket and the prefix")
    return max(map(int, steps))


async def aws(*arguments: str, verbose: bool = False) -> str:
    """Run the AWS CLI, which finds its own credentials, and return its output."""
    logger.info("aws %s", " ".join(arguments))
    if shutil.which("aws") is None:
        raise Unsupported(
            "S3 needs the AWS CLI, which is not installed where this server runs",
            hint="Install `awscli` there, or copy checkpoints with `launcher pull`",
        )
    process = await asyncio.create_subprocess_exec(
        "aws",
        *arguments,
        env=environment_without_keys(),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    if process.returncode:
        cause = err.decode(errors="replace").strip().splitlines() or [str(process.returncode)]
        raise BadRequest(
            f"`aws {' '.join(arguments[:2])}` failed: {cause[-1]}",
            hint="Check the bucket's name and the server's AWS credentials",
        )
    output = out.decode(errors="replace")
    for line in output.splitlines() if verbose else []:
        logger.info("aws: %s", line)
    return output
