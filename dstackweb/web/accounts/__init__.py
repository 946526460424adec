"""Pages for signing in, members, tokens and secrets."""
