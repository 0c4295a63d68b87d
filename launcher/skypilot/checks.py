"""The checks of `launcher doctor` for SkyPilot: version, API server, clouds and quotas."""

import importlib.metadata

from kit.package_data import how_to_install
from launcher.errors import LauncherError
from launcher.provider import Check
from launcher.skypilot.door import ANY, sky, translated

_VERSION = "0.14"
# Where each cloud shows its GPU quota. It is 0 in a new account, so the first launch would fail.
_QUOTA = {
    "aws": "Service Quotas, EC2, `Running On-Demand P instances`",
    "gcp": "IAM & Admin, Quotas, `GPUS_ALL_REGIONS` and `NVIDIA_H100_GPUS`",
    "azure": "Quotas, Compute, the family of the GPU, `Standard NCadsH100v5`",
}


def checks() -> list[Check]:
    """Check SkyPilot layer by layer, and skip the checks that depend on a failed one."""
    skypilot = sky()  # raises if it is not installed
    version = importlib.metadata.version("skypilot")
    found = [
        Check(
            "SkyPilot",
            version.startswith(_VERSION),
            f"version {version}; the launcher is built for {_VERSION}",
            how_to_install("sky"),
        )
    ]
    try:
        with translated(ANY):
            # Starts a local API server if none runs, like every other command.
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
            f"SkyPilot has credentials for: {names}"
            if clouds
            else "SkyPilot has no access to any cloud",
            "Run `sky check` to see what each cloud needs",
        )
    )
    for cloud in clouds:
        if where := _QUOTA.get(str(cloud).lower()):
            message = f"SkyPilot cannot read the GPU quota of {cloud}; it is under {where}"
            found.append(Check("quota", True, message, "Raise it before you launch a GPU"))
    return found
