"""What can go wrong on the laptop side, named for what the user sees.

LauncherError
├── TaskError         the task YAML cannot be used
├── ClusterNotFound   no cluster of that name
├── RunNotFound       the cluster has no such run
├── NoCloud           SkyPilot has no credentials of any cloud
├── NoCapacity        nobody has the machine that was asked for
├── ProviderError     SkyPilot, or the local sandbox, failed
├── RemoteError       a command or transfer on the cluster failed
│   └── Unreachable   the connection to it did not open, or broke off
└── DamagedCheckpoint a pulled file does not match its sha256
"""

from kit.errors import KitError


class LauncherError(KitError):
    """Any error of the launcher."""


class TaskError(LauncherError):
    hint = "See the tasks in `sky/` for working ones"


class ClusterNotFound(LauncherError):
    hint = "List clusters with `launcher ls`"


class RunNotFound(LauncherError):
    hint = "List runs with `launcher ls -c CLUSTER`"


class NoCloud(LauncherError):
    hint = "See with `sky check` what each cloud needs"


class NoCapacity(LauncherError):
    hint = "Try another GPU, or add a cloud with `sky check`"


class ProviderError(LauncherError):
    hint = "See what SkyPilot says with `sky status` and `sky api logs`"


class RemoteError(LauncherError):
    hint = "Check that the cluster answers with `ssh art`"


class Unreachable(RemoteError):
    pass


class DamagedCheckpoint(LauncherError):
    hint = "Run `launcher pull` again; it fetches only what is missing or damaged"
