"""What an hour of GPUs costs, from SkyPilot's catalogs of the enabled clouds."""

import logging
import math

from launcher.errors import LauncherError, NoCloud
from launcher.provider import Price
from launcher.skypilot.door import ANY, sky, translated

logger = logging.getLogger(__name__)


def prices() -> dict[tuple[str, int], Price]:
    """The lowest price of each card and number of cards, without spot instances."""
    skypilot = sky()
    with translated(ANY):
        clouds = [str(cloud) for cloud in skypilot.get(skypilot.client.sdk.enabled_clouds())]
    if not clouds:
        raise NoCloud("SkyPilot has no access to any cloud")
    found: dict[tuple[str, int], Price] = {}
    failure: LauncherError | None = None
    for cloud in clouds:
        try:
            with translated(ANY):
                request = skypilot.client.sdk.list_accelerators(gpus_only=True, clouds=[cloud])
                listed = skypilot.get(request)
        except LauncherError as error:  # the other clouds still have prices
            logger.warning("no prices of %s: %s", cloud, error.message)
            failure = error
            continue
        for offers in listed.values():
            for offer in offers:
                _add(found, offer.accelerator_name, offer.accelerator_count, offer.price, cloud)
    if failure and not found:
        raise failure
    return found


def _add(
    found: dict[tuple[str, int], Price], card: str, count: float, dollars: float, cloud: str
) -> None:
    """Keep the offer if it is the cheapest so far; a part of a card, or no price, is none."""
    if count != int(count) or dollars is None or math.isnan(dollars):
        return
    key = card, int(count)
    if key not in found or dollars < found[key].per_hour:
        found[key] = Price(float(dollars), cloud)
