"""GPU samples: read, stored, averaged and looked up."""
