"""Numbers are grouped as in English pages, and as `1,449` is written everywhere else: Django groups none."""

THOUSAND_SEPARATOR = ","
NUMBER_GROUPING = 3
