"""What `launcher up --for` and `launcher doctor MODEL` say about cards: memory and prices."""

import json
import sys
from typing import TYPE_CHECKING

import click

from kit.cli import data, note
from launcher.cli.target import Target

if TYPE_CHECKING:
    from launcher.doctor import Offer


def options_for(
    target: Target, model: str, arguments: list[str]
) -> tuple[tuple[str, str], dict[str, str]]:
    """The argument of `sky launch` and the variables for the cheapest cards that hold `model`."""
    from launcher.doctor import cheapest

    if target.local:
        raise click.UsageError("`--for` rents GPUs: remove `--local`, or set BASE_MODEL in `.env`")
    if any(argument.startswith(("--gpus", "--instance-type")) for argument in arguments):
        raise click.UsageError("`--for` chooses the GPUs: remove `--for`, or the GPUs you name")
    offer, unknown = cheapest(target.cluster, model)
    one = offer.fit
    if unknown:
        note(f"Prices are unknown, so the smallest cards are chosen: {unknown}")
    cost = f"; {_price(offer)}" if offer.price else ""
    note(
        f"`{model}` needs {one.engine:.1f} GiB to sample and {one.learner:.1f} GiB to train: "
        f"{offer.name} has {one.card.memory_gib:.0f} GiB a card{cost}"
    )
    envs = {"BASE_MODEL": model}
    if offer.engine_args:
        envs["ART_ENGINE_ARGS"] = json.dumps(offer.engine_args)
        settings = ", ".join(f"{name}={value}" for name, value in offer.engine_args.items())
        note(f"vLLM gets {settings}")
    return ("--gpus", offer.name), envs


def show_cards(target: Target, model: str, as_json: bool) -> None:
    """List the cards that hold `model`, the cheapest first, and exit with 1 if there is none."""
    from launcher.doctor import offers

    found, unknown = offers(target.cluster, model)
    if as_json:
        data([_row(offer) for offer in found])
    for offer in [] if as_json else found:
        one = offer.fit
        shared = f"{one.engine:.1f} to sample, {one.learner:.1f} to train"
        where = "of" if one.count == 1 else "of each card's"
        cost = f"\t{_price(offer)}" if offer.price else ""
        click.echo(f"{offer.name}\t{shared}, {where} {one.card.memory_gib:.0f} GiB{cost}")
    if not found:
        note(f"No listed card holds `{model}`, not even eight of the largest")
        sys.exit(1)
    if unknown:
        note(f"Prices are unknown: {unknown}")
    note(f"Next: `launcher up --for {model}`, which rents {found[0].name}")


def show_prices(target: Target, as_json: bool) -> None:
    """List what SkyPilot's clouds charge for the cards that the kit knows."""
    from kit.gpus import CARDS

    listed = target.cluster.provider.prices()
    known = {key: price for key, price in sorted(listed.items()) if key[0] in CARDS}
    if as_json:
        data([{"card": key[0], "count": key[1], **vars(known[key])} for key in known])
    for (card, count), price in ({} if as_json else known).items():
        click.echo(f"{card}:{count}\t${price.per_hour:.2f} an hour\t{price.cloud}")


def _price(offer: "Offer") -> str:
    assert offer.price
    return f"${offer.price.per_hour:.2f} an hour on {offer.price.cloud}"


def _row(offer: "Offer") -> dict[str, object]:
    one, price = offer.fit, offer.price
    return {
        "card": one.card.name,
        "count": one.count,
        "memory_gib": one.card.memory_gib,
        "engine_gib": round(one.engine, 1),
        "learner_gib": round(one.learner, 1),
        "gpu_memory_utilization": one.gpu_memory_utilization,
        "dollars_per_hour": price.per_hour if price else None,
        "cloud": price.cloud if price else None,
    }
