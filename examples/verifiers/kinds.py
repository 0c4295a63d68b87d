"""Kinds of things, each with words that name one, and the two parts of the reward."""

KINDS = {
    "animal": "dog cat horse cow pig sheep lion tiger bear wolf fox rabbit mouse elephant monkey",
    "bird": "robin eagle owl crow duck swan goose parrot pigeon hawk sparrow penguin chicken",
    "colour": "red blue green yellow orange purple pink brown black white gray grey violet",
    "country": "france germany italy spain japan china india brazil canada mexico egypt kenya",
    "fruit": "apple banana orange pear grape lemon lime peach plum cherry mango melon kiwi",
    "metal": "iron gold silver copper tin lead zinc steel aluminum nickel titanium platinum",
    "planet": "mercury venus earth mars jupiter saturn uranus neptune",
    "tree": "oak pine elm maple birch willow cedar fir ash beech spruce",
    "vegetable": "carrot potato onion tomato pea bean cabbage spinach lettuce broccoli pepper",
    "season": "spring summer autumn fall winter",
    "instrument": "piano guitar violin flute drum trumpet cello harp clarinet saxophone",
    "month": "january february march april may june july august september october november",
}


def prompt(kind: str) -> str:
    return f"Name one {kind}. Answer with a single word."


def shortness(reply: str) -> float:
    """1 for a single word, less for every further one."""
    return 1 / max(len(reply.split()), 1)


def names_one(reply: str, words: str) -> float:
    """Whether a word of the kind is among the first three words."""
    first = [word.strip(".,!*\"'").lower() for word in reply.split()[:3]]
    return float(any(word in words.split() for word in first))
