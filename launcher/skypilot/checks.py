"""What `doctor` asks SkyPilot: its version, its API server, the clouds and their quotas."""

import importlib.metadata

from launcher.errors import LauncherError
from launcher.provider import Check
from launcher.skypilot.door import ANY, sky, translated

_WANTED = "0.14"
# What a new account may not rent before it asked: the first launch of a GPU fails without it.
_QUOTA = {
    "aws": "Service Quotas, EC2, `Running On-Demand P instances`",
    "gcp": "IAM & Admin, Quotas, `GPUS_ALL_REGIONS` and `NVIDIA_H100_GPUS`",
    "azure": "Quotas, Compute, the family of the GPU, `Standard NCadsH100v5`",
}


def checks() -> list[Check]:
    """SkyPilot from the inside out; what hangs on a broken thing is not asked."""
    version = importlib.metadata.version("skypilot")
    found = [
        Check(
            "SkyPilot",
            version.startswith(_WANTED),
            f"version {version}, and {_WANTED} is what this was built on",
            "Install it with `scripts/install`",
        )
    ]
    skypilot = sky()
    try:
        with translated(ANY):
            # Starts a local one that is not up, as every other command would.
            clouds = skypilot.get(skypilot.client.sdk.enabled_clouds())
            server = skypilot.api_info()
    except LauncherError as error:
        return [*found, Check("API server", False, error.message, error.hint)]
    found.append(Check("API server", True, f"{server.status.value}, version {server.version}"))
    names = ", ".join(str(cloud) for cloud in clouds)
    found.append(
        Check(
            "clouds",
            bool(clouds),
            f"SkyPilot has credentials of: {names}" if clouds else "SkyPilot may use no cloud yet",
            "See with `sky check` what each cloud needs",
        )
    )
    for cloud in clouds:
        if where := _QUOTA.get(str(cloud).lower()):
            told = f"SkyPilot cannot see the GPU quota of {cloud}; it is under {where}"
            found.append(Check("quota", True, told, "Ask for more there before you launch a GPU"))
    return found
