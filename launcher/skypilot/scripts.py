"""The bash that runs on a cluster of SkyPilot's: the server with its setup, and runs beside it."""

import shlex
from collections.abc import Mapping

from launcher.provider import SETUP_FAILED, WORKDIR

EXIT_CODES = ".art-cluster/exit-codes"
LEASE_ENDS = ".art-cluster/lease-ends"

# A login shell finds `trainer`. On Slurm that shell reads the account's own .bashrc, where
# SkyPilot's line has moved HOME to the cluster's directory by then.
_ACTIVATE = f"""
line='[ ! -f ~/{WORKDIR}/.venv/bin/activate ] || . ~/{WORKDIR}/.venv/bin/activate'
rc=$(getent passwd "$(id -u)" | cut -d: -f6)/.bashrc
grep -qxF "$line" "$rc" 2>/dev/null || printf '%s\\n' "$line" >>"$rc"
"""
_ENTER = f"[ ! -d ~/{WORKDIR} ] || cd ~/{WORKDIR}\n"
# In parentheses, so that it leaves nothing behind, and not left of `||`, which would turn off its
# `set -e`. The names are those that SkyPilot gives a setup.
_SETUP = """(
export SKYPILOT_SETUP_NODE_IPS="$SKYPILOT_NODE_IPS" SKYPILOT_SETUP_NODE_RANK="$SKYPILOT_NODE_RANK"
export SKYPILOT_SETUP_NUM_GPUS_PER_NODE="$SKYPILOT_NUM_GPUS_PER_NODE"
%s
)
code=$?
[ $code = 0 ] || { echo "%s with code $code"; exit $code; }
"""


def server(
    run: str, setup: str | None, envs: Mapping[str, str], *, hours_include_setup: bool
) -> str:
    """Set up, note when the lease is over, and serve."""
    parts = [_ACTIVATE, _ENTER]
    if setup:
        parts += [_SETUP % (setup, SETUP_FAILED), _ENTER]
    return "".join([*parts, _begin_lease(envs, hours_include_setup), run])


def run(command: str) -> str:
    """`command`, ended with the lease as the server is: a cluster with a run on it stays up.

    SkyPilot tells whether a job failed, not with which code, so that is noted. With `exit`, unlike
    the server: what SkyPilot adds to the end waits until no file of a bucket is open any more, and
    the server beside the run has its logs open.
    """
    return (
        f"ends=$(cat ~/{LEASE_ENDS} 2>/dev/null || echo 0)\n"
        "left=$(( ends ? ends - $(date +%s) : 0 )); [ $left -ge 0 ] || left=1\n"
        f"timeout --kill-after=30 $left bash -c {shlex.quote(command)}\n"
        f"code=$?\nmkdir -p ~/{EXIT_CODES}\n"
        f"echo $code >~/{EXIT_CODES}/$SKYPILOT_INTERNAL_JOB_ID\nexit $code\n"
    )


def _begin_lease(envs: Mapping[str, str], include_setup: bool) -> str:
    """For runs beside the server and for `cost`: note on the cluster when the lease is over."""
    seconds = int(float(envs.get("ART_MAX_HOURS") or 0) * 3600)
    lines = ["mkdir -p ~/.art-cluster"]
    if not seconds:
        lines.append(f"rm -f ~/{LEASE_ENDS}")
    elif include_setup:
        lines += [
            f"left=$(( {seconds} - SECONDS )); [ $left -gt 0 ] || left=1",
            "export ART_MAX_HOURS=$(awk -v left=$left 'BEGIN { print left / 3600 }')",
            f"echo $(( $(date +%s) + left )) >~/{LEASE_ENDS}",
        ]
    else:
        lines.append(f"echo $(( $(date +%s) + {seconds} )) >~/{LEASE_ENDS}")
    return "\n".join([*lines, ""])
