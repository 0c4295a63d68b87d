"""The bash scripts that run on a cluster of SkyPilot: the server with its setup, and other runs."""

import shlex

from kit.state_dir import PULLED
from launcher.provider import ACTIVATE, CLUSTER_STATE_DIR, SETUP_FAILED, WORKDIR

EXIT_CODES = ".art-cluster/exit-codes"
"""Directory below the cluster's home with one file per finished run."""
LEASE_ENDS = ".art-cluster/lease-ends"
"""File below the cluster's home: when the lease ends, in seconds since 1970.

Three more words let a run find the time that is left although the wall clock was changed: the
seconds of the lease, the id of the machine's boot, and the end in seconds since that boot.
"""
OVERTIME_S = 600
"""Seconds after the end of the lease when a server that did not exit by itself is killed."""
PULL_FRESH_S, PULL_MAX_S = 150, 3600
"""A pull runs while its mark is this fresh. The cluster waits this long for it at most."""

# Makes the project's programs and `trainer` available in login shells. On Slurm such a shell reads
# the .bashrc of the account; by then SkyPilot's line in it has set HOME to the cluster's directory.
_ACTIVATE = f"""
line='{ACTIVATE}'
rc=$(getent passwd "$(id -u)" | cut -d: -f6)/.bashrc
grep -qxF "$line" "$rc" 2>/dev/null || printf '%s\\n' "$line" >>"$rc"
"""
# Where SkyPilot writes the script of each job, with its secrets, for every user to read.
_HIDE_JOBS = "chmod -f 700 ~/.sky/sky_app\n"
_ENTER = f"[ ! -d ~/{WORKDIR} ] || cd ~/{WORKDIR}\n"
# The hours of the lease in seconds, and 0 for no limit.
_LIMIT = """limit=$(awk -v hours="${ART_MAX_HOURS:-0}" 'BEGIN { printf "%d", hours * 3600 }')\n"""
# A setup that hangs must not keep the cluster up: SkyPilot ends none with a running job. Functions
# of this shell, such as `conda`, are exported, because the setup gets a shell of its own.
_GUARDED_SETUP = """\
export -f $(compgen -A function)
timeout --kill-after=30 $limit bash -c %s
code=$?
[ $code != 124 ] || echo "The setup took longer than the lease of $ART_MAX_HOURS hours"
"""
# A subshell, because only a setup has these variables of SkyPilot.
_SETUP = """(
export SKYPILOT_SETUP_NODE_IPS="$SKYPILOT_NODE_IPS" SKYPILOT_SETUP_NODE_RANK="$SKYPILOT_NODE_RANK"
export SKYPILOT_SETUP_NUM_GPUS_PER_NODE="$SKYPILOT_NUM_GPUS_PER_NODE"
%s
exit $code
)
code=$?
[ $code = 0 ] || { echo "%s with code $code"; exit $code; }
"""
# Records on the cluster when the lease ends, for other runs and for `launcher cost`.
_START_LEASE = f"""\
mkdir -p ~/.art-cluster
left=$limit
if [ $left = 0 ]; then
  rm -f ~/{LEASE_ENDS}
else
%s  boot=$(cat /proc/sys/kernel/random/boot_id 2>/dev/null || echo unknown)
  up=$(cut -d. -f1 /proc/uptime 2>/dev/null || echo 0)
  echo $(( $(date +%%s) + left )) $left $boot $(( up + left )) >~/{LEASE_ENDS}
fi
"""
# `timeout` is a process of its own: it ends the server even if that is stopped or hangs. It sends
# SIGTERM and SIGCONT, and SIGKILL 30 seconds later. Functions of this shell, such as `conda`, are
# exported, because the server gets a shell of its own.
_SERVE = """\
export -f $(compgen -A function)
timeout --kill-after=30 $(( left ? left + %d : 0 )) bash -c %s
code=$?
"""
# Until this script ends, SkyPilot does not end the cluster. Rounds are counted instead of seconds,
# so that a change of the clock does not matter.
_WAIT_FOR_PULL = f"""\
pull_runs() {{ [ -n "$(find ~/{CLUSTER_STATE_DIR}/{PULLED} -newermt '-{PULL_FRESH_S} seconds' \
  ! -newermt '+{PULL_FRESH_S} seconds' 2>/dev/null)" ]; }}
for _ in $(seq {PULL_MAX_S // 5}); do pull_runs || break; sleep 5; done
(exit $code)
"""
_SUBTRACT_SETUP = """\
  left=$(( left - SECONDS )); [ $left -gt 0 ] || left=1
  export ART_MAX_HOURS=$(awk -v left=$left 'BEGIN { print left / 3600 }')
"""


def server(run: str, setup: str | None, *, hours_include_setup: bool) -> str:
    """Set up, start the lease of `$ART_MAX_HOURS`, serve, and let a running pull finish.

    With `hours_include_setup` the time of the setup counts towards the lease.
    """
    parts = [_HIDE_JOBS, _ACTIVATE, _ENTER, _LIMIT]
    if setup:
        parts += [_SETUP % (_guarded(setup), SETUP_FAILED), _ENTER]
    parts.append(_START_LEASE % (_SUBTRACT_SETUP if hours_include_setup else ""))
    parts += [_SERVE % (OVERTIME_S, shlex.quote(run)), _WAIT_FOR_PULL]
    return "".join(parts)


def setup_first(setup: str) -> str:
    """The setup of every machine, before the server's job; it ends with the hours of the lease."""
    return f"{_LIMIT}{_guarded(setup)}exit $code\n"


def _guarded(setup: str) -> str:
    return _GUARDED_SETUP % shlex.quote(setup)


def run(command: str) -> str:
    """Run `command` on the first machine, until the lease ends: a running job keeps a cluster up.

    SkyPilot reports whether a job failed, but not its exit code, so the script records the code.
    It ends with `exit`, unlike the server's: SkyPilot appends commands that wait until no file of a
    bucket is open, and the server next to the run keeps its logs open.
    """
    return (
        '[ "${SKYPILOT_NODE_RANK:-0}" = 0 ] || exit 0\n'
        f"{{ read -r ends lease boot up_ends <~/{LEASE_ENDS}; }} 2>/dev/null || ends=0\n"
        "left=$(( ends ? ends - $(date +%s) : 0 ))\n"
        # A machine that was restarted has another boot: there the wall clock has to do.
        'if [ -n "$boot" ] && [ "$boot" = "$(cat /proc/sys/kernel/random/boot_id)" ]; then\n'
        "  left=$(( up_ends - $(cut -d. -f1 /proc/uptime) ))\n"
        "fi\n"
        '[ "$ends" = 0 ] || [ $left -gt 0 ] || left=1\n'
        '[ -z "$lease" ] || [ $left -le $lease ] || left=$lease\n'
        f"timeout --kill-after=30 $left bash -c {shlex.quote(command)}\n"
        f"code=$?\nmkdir -p ~/{EXIT_CODES}\n"
        f"echo $code >~/{EXIT_CODES}/$SKYPILOT_INTERNAL_JOB_ID\nexit $code\n"
    )
