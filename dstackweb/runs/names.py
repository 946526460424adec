"""Names for runs whose file gives none: two friendly words and a number."""

from __future__ import annotations

import random

ADJECTIVES = (
    "amber", "brave", "bright", "calm", "clever", "crisp", "eager", "early", "fair", "fast", "fresh",
    "gentle", "grand", "happy", "keen", "kind", "light", "lively", "lucky", "mellow", "merry", "mild", "neat",
    "nimble", "noble", "plain", "proud", "quick", "quiet", "rapid", "ready", "sharp", "shiny", "silver",
    "sleek", "smart", "smooth", "snug", "solid", "steady", "sunny", "sweet", "swift", "tidy", "vivid", "warm",
    "wise", "witty", "young",
)  # fmt: skip
NOUNS = (
    "badger", "beaver", "bison", "bobcat", "condor", "crane", "dolphin", "eagle", "falcon", "ferret", "finch",
    "fox", "gecko", "gull", "hare", "hawk", "heron", "ibis", "jackal", "jay", "koala", "lark", "lemur",
    "lynx", "marten", "mole", "moose", "moth", "newt", "ocelot", "orca", "osprey", "otter", "owl", "panda",
    "petrel", "puffin", "quail", "raven", "robin", "seal", "shrew", "sparrow", "stork", "swan", "tapir",
    "tern", "toad", "vole", "walrus", "wren", "yak",
)  # fmt: skip


def random_name(rnd: random.Random) -> str:
    """A name such as `swift-otter-417`; of some 2.5 million."""
    return f"{rnd.choice(ADJECTIVES)}-{rnd.choice(NOUNS)}-{rnd.randint(1, 999)}"
