"""Where capacity comes from: models, the contract, and one folder per kind."""
