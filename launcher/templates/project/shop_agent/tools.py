"""The agent's tools: two functions that look a number up in a shop. Replace them with yours."""

PRICE_AND_STOCK = {
    "lamp": (34, 7),
    "chair": (89, 12),
    "mirror": (45, 3),
    "kettle": (29, 18),
    "desk": (240, 5),
    "clock": (19, 26),
    "pillow": (22, 40),
    "vase": (15, 31),
    "rug": (130, 4),
    "stool": (38, 14),
}


def price(item: str) -> str:
    """The price of an item in euros."""
    return str(PRICE_AND_STOCK[item][0]) if item in PRICE_AND_STOCK else "unknown item"


def stock(item: str) -> str:
    """How many of an item are in stock."""
    return str(PRICE_AND_STOCK[item][1]) if item in PRICE_AND_STOCK else "unknown item"
