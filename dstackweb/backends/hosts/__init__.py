"""The team's own machines: what they have, who may use it, and the work done on them."""
