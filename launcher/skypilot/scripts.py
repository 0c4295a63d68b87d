"""The bash scripts that run on a cluster of SkyPilot: the server with its setup, and other runs."""

import shlex

from launcher.provider import SETUP_FAILED, WORKDIR

EXIT_CODES = ".art-cluster/exit-codes"
"""Directory below the cluster's home with one file per finished run."""
LEASE_ENDS = ".art-cluster/lease-ends"
"""File below the cluster's home: when the lease ends, in seconds since 1970."""

# Makes `trainer` available in login shells. On Slurm such a shell reads the .bashrc of the account,
# and by then SkyPilot's line in it has set HOME to the cluster's directory.
_ACTIVATE = f"""
line='[ ! -f ~/{WORKDIR}/.venv/bin/activate ] || . ~/{WORKDIR}/.venv/bin/activate'
rc=$(getent passwd "$(id -u)" | cut -d: -f6)/.bashrc
grep -qxF "$line" "$rc" 2>/dev/null || printf '%s\\n' "$line" >>"$rc"
"""
_ENTER = f"[ ! -d ~/{WORKDIR} ] || cd ~/{WORKDIR}\n"
# A subshell, so that the setup cannot change the server's shell. It is not the left side of `||`,
# which would turn off its `set -e`. The variables are those that SkyPilot gives to a setup.
_SETUP = """(
export SKYPILOT_SETUP_NODE_IPS="$SKYPILOT_NODE_IPS" SKYPILOT_SETUP_NODE_RANK="$SKYPILOT_NODE_RANK"
export SKYPILOT_SETUP_NUM_GPUS_PER_NODE="$SKYPILOT_NUM_GPUS_PER_NODE"
%s
)
code=$?
[ $code = 0 ] || { echo "%s with code $code"; exit $code; }
"""
# Records on the cluster when the lease ends, for other runs and for `launcher cost`.
_START_LEASE = f"""\
mkdir -p ~/.art-cluster
left=$(awk -v hours="${{ART_MAX_HOURS:-0}}" 'BEGIN {{ printf "%%d", hours * 3600 }}')
if [ $left = 0 ]; then
  rm -f ~/{LEASE_ENDS}
else
%s  echo $(( $(date +%%s) + left )) >~/{LEASE_ENDS}
fi
"""
_SUBTRACT_SETUP = """\
  left=$(( left - SECONDS )); [ $left -gt 0 ] || left=1
  export ART_MAX_HOURS=$(awk -v left=$left 'BEGIN { print left / 3600 }')
"""


def server(run: str, setup: str | None, *, hours_include_setup: bool) -> str:
    """Set up, start the lease of `$ART_MAX_HOURS`, and serve.

    With `hours_include_setup` the time of the setup counts towards the lease.
    """
    parts = [_ACTIVATE, _ENTER]
    if setup:
        parts += [_SETUP % (setup, SETUP_FAILED), _ENTER]
    parts.append(_START_LEASE % (_SUBTRACT_SETUP if hours_include_setup else ""))
    return "".join([*parts, run])


def run(command: str) -> str:
    """Run `command` until the lease ends, because a cluster with a running job stays up.

    SkyPilot reports whether a job failed, but not its exit code, so the script records the code.
    It ends with `exit`, unlike the server's: SkyPilot appends commands that wait until no file of a
    bucket is open, and the server next to the run keeps its logs open.
    """
    return (
        f"ends=$(cat ~/{LEASE_ENDS} 2>/dev/null || echo 0)\n"
        "left=$(( ends ? ends - $(date +%s) : 0 )); [ $left -ge 0 ] || left=1\n"
        f"timeout --kill-after=30 $left bash -c {shlex.quote(command)}\n"
        f"code=$?\nmkdir -p ~/{EXIT_CODES}\n"
        f"echo $code >~/{EXIT_CODES}/$SKYPILOT_INTERNAL_JOB_ID\nexit $code\n"
    )
