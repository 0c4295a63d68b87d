"""The launcher's errors, named for what the user sees.

LauncherError
├── TaskError         the task YAML cannot be used
├── ProjectError      a project cannot be written or launched
├── ClusterNotFound   no cluster of that name
├── RunNotFound       the cluster has no such run
├── NoCloud           SkyPilot has no credentials for any cloud
├── NoCapacity        no cloud has the requested machine
├── ProviderError     SkyPilot or the local sandbox failed
├── RemoteError       a command or transfer on the cluster failed
│   └── Unreachable   the connection to the cluster failed to open, or broke
└── DamagedCheckpoint a pulled file does not match its sha256
"""

from kit.errors import KitError


class LauncherError(KitError):
    """Any error of the launcher."""


class TaskError(LauncherError):
    hint = "`launcher tasks` lists working examples"


class ProjectError(LauncherError):
    hint = "`launcher init --help` shows the choices"


class ClusterNotFound(LauncherError):
    hint = "List clusters with `launcher ls`"


class RunNotFound(LauncherError):
    hint = "List runs with `launcher ls -c CLUSTER`"


class NoCloud(LauncherError):
    hint = "Run `sky check` to see what each cloud needs"


class NoCapacity(LauncherError):
    hint = "Try another GPU, or another cloud: `sky check` shows what each one needs"


class ProviderError(LauncherError):
    hint = "`sky status` and `sky api logs` show more"


class RemoteError(LauncherError):
    hint = "Check that you can reach the cluster with `ssh CLUSTER`"


class Unreachable(RemoteError):
    pass


class DamagedCheckpoint(LauncherError):
    hint = "Run `launcher pull` again; it fetches only missing and damaged files"
