"""Pages for the state of the deployment."""
